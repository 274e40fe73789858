"""A user's agent: a coroutine function that runs a task to its reward, or a factory whose agent is asked the prompt."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

from strands_tito.collect.errors import AgentError
from strands_tito.collect.task import PROMPT
from tito_core.ledger.ledger import Ledger
from tito_core.termination import ANNOTATION, Outcome, Termination

if TYPE_CHECKING:
    from tito_core.model import TITOModel

REWARD = "reward"
ParsedCallText = float | Mapping[str, Any] | None
"""What a run says of its rollout: a reward, annotations by name, or nothing."""


class Invocable(Protocol):
    """What a factory makes: Strands' `Agent`, or another that is asked the same way."""

    def invoke_async(self, prompt: Any = None, **kwargs: Any) -> Awaitable[Any]:
        """Run to the end."""


Run = Callable[["TITOModel", Mapping[str, Any]], Awaitable[ParsedCallText]]
Factory = Callable[["TITOModel", Mapping[str, Any]], Invocable]


@dataclass(frozen=True, slots=True)
class AgentCode:
    """What runs a task.

    Attributes:
        call: The user's function.
        is_run: Whether it is a coroutine function that runs the task itself, or a factory of agents.
    """

    call: Callable[..., Any]
    is_run: bool

    @classmethod
    def of(cls, given: str | Run | Factory, folder: str | PathLike[str] | None = None) -> AgentCode:
        """Take a function, or the name of one as `module:function`.

        Args:
            given: The function or its name.
            folder: Where modules are looked for first; None for where Python looks.

        Raises:
            AgentError: There is no such module or function.
        """
        call = _named(given, folder) if isinstance(given, str) else given
        if not callable(call):
            raise AgentError(f"{given!r} is of type {type(call).__name__}, and must be a function of (model, task).")
        return cls(call, _is_coroutine_function(call))

    async def run(self, model: TITOModel, task: Mapping[str, Any]) -> tuple[Outcome | None, ParsedCallText]:
        """Run a task; give what the agent returned where it tells why it stopped, and what was said of the rollout.

        Raises:
            AgentError: A factory made no agent.
            Exception: Whatever the user's code and the agent raise.
        """
        made = self.call(model, task)
        if self.is_run:
            return None, await made
        if not hasattr(made, "invoke_async"):
            if inspect.iscoroutine(made):
                made.close()
            raise AgentError(
                f"The factory gave {made!r:.200}, which is not an agent: return a Strands Agent, or make it an "
                "`async def run(model, task)` that returns the reward."
            )
        end_servers = getattr(made, "cleanup", _nothing)  # of its tools, which else live on until the agent is found
        try:
            result = await made.invoke_async(task[PROMPT])
        except BaseException:
            with suppress(Exception):  # why the rollout ended, and whether it was cancelled, is told by what came first
                end_servers()
            raise
        end_servers()
        return (result if hasattr(result, "stop_reason") else None), None


def annotate(ledger: Ledger, said: ParsedCallText) -> Termination | None:
    """Write to a ledger what a run said of it; give the reason for its end where that was said.

    Raises:
        AgentError: It is nothing that can be kept.
    """
    if said is None:
        return None
    named = said if isinstance(said, Mapping) else {REWARD: said}
    reward = named.get(REWARD)
    if reward is not None and not (_is_number(reward) and math.isfinite(reward)):
        raise AgentError(f"A reward is a finite number, and {reward!r} came: return a float, or {{'reward': float}}.")
    ended = named.get(ANNOTATION)
    if ended is not None and ended not in list(Termination):
        raise AgentError(f"The termination {ended!r} is none of {', '.join(Termination)}.")
    for name, value in named.items():
        if name != ANNOTATION and value is not None:
            ledger.annotate(name, float(value) if name == REWARD else value)
    return None if ended is None else Termination(ended)


def _nothing() -> None:
    pass


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str | bytes)


def _is_coroutine_function(call: Any) -> bool:
    while isinstance(call, partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004  # the method is looked at, not called


def _named(name: str, folder: str | PathLike[str] | None) -> Any:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise AgentError(f"The agent {name!r} must be named as module:function, such as agents.math:run.")
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module is there, and lacks another
        raise AgentError(f"There is no module {module!r}: run in its folder, or set PYTHONPATH.") from error
    except SystemExit as error:
        raise AgentError(
            f"Module {module!r} raised {error!r} when it was imported: an agent's module must not."
        ) from error
    for part in function.split("."):
        if not hasattr(found, part):
            raise AgentError(f"Module {module!r} has no {function!r}.")
        found = getattr(found, part)
    return found
