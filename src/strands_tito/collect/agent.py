"""The user's agent code: a coroutine function that runs a task, or a factory of agents that get the task's prompt."""

from __future__ import annotations

import inspect
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
from tito_core.ledger.header import REWARD, as_reward
from tito_core.ledger.ledger import Ledger
from tito_core.termination import ANNOTATION, Outcome, Termination

if TYPE_CHECKING:
    from tito_core.model import TITOModel

RunReturn = float | Mapping[str, Any] | None
"""What a run returns: a reward, annotations by name, or None."""


class Invocable(Protocol):
    """What a factory returns: a Strands `Agent`, or an object with the same `invoke_async`."""

    def invoke_async(self, prompt: Any = None, **kwargs: Any) -> Awaitable[Any]:
        """Run the agent to its end."""


Run = Callable[["TITOModel", Mapping[str, Any]], Awaitable[RunReturn]]
Factory = Callable[["TITOModel", Mapping[str, Any]], Invocable]


@dataclass(frozen=True, slots=True)
class AgentCode:
    """The user's function.

    Attributes:
        call: The function.
        is_run: True for a coroutine function that runs the task itself, False for a factory of agents.
    """

    call: Callable[..., Any]
    is_run: bool

    @classmethod
    def of(cls, function: str | Run | Factory, folder: str | PathLike[str] | None = None) -> AgentCode:
        """Wrap a function, given as itself or as `module:function`.

        Args:
            function: The function or its name.
            folder: Put in front of `sys.path` for the import; None changes nothing.

        Raises:
            AgentError: The module or function was not found.
        """
        call = _load(function, folder) if isinstance(function, str) else function
        if not callable(call):
            raise AgentError(f"{function!r} is of type {type(call).__name__}; it must be a function of (model, task).")
        return cls(call, _is_coroutine_function(call))

    async def run(self, model: TITOModel, task: Mapping[str, Any]) -> tuple[Outcome | None, RunReturn]:
        """Run a task.

        Returns:
            The agent's result if it has a stop reason, else None; and what a run returned, None for a factory.

        Raises:
            AgentError: The factory did not return an agent.
            Exception: Whatever the user's code and the agent raise.
        """
        made = self.call(model, task)
        if self.is_run:
            return None, await made
        if not hasattr(made, "invoke_async"):
            if inspect.iscoroutine(made):
                made.close()
            raise AgentError(
                f"The factory returned {made!r:.200}, which is not an agent. Return a Strands Agent, or write an "
                "`async def run(model, task)` that returns the reward."
            )
        cleanup = getattr(
            made, "cleanup", _nothing
        )  # stops tool servers, which otherwise live until garbage collection
        try:
            result = await made.invoke_async(task[PROMPT])
        except BaseException:
            with suppress(Exception):  # the first error decides the termination
                cleanup()
            raise
        cleanup()
        return (result if hasattr(result, "stop_reason") else None), None


def annotate(ledger: Ledger, returned: RunReturn) -> Termination | None:
    """Annotate a ledger with what a run returned; return the termination if the run set one.

    Raises:
        AgentError: The reward is not a finite number, or the termination is unknown.
    """
    if returned is None:
        return None
    annotations = returned if isinstance(returned, Mapping) else {REWARD: returned}
    try:
        reward = None if (given := annotations.get(REWARD)) is None else as_reward(given)
    except ValueError as error:
        raise AgentError(f"{error} In a run, return a float, or {{'reward': float}}.") from error
    termination = annotations.get(ANNOTATION)
    if termination is not None and termination not in list(Termination):
        raise AgentError(f"Unknown termination {termination!r}. Available: {', '.join(Termination)}.")
    for name, value in annotations.items():
        if name != ANNOTATION and value is not None:
            ledger.annotate(name, reward if name == REWARD else value)
    return None if termination is None else Termination(termination)


def _nothing() -> None:
    pass


def _is_coroutine_function(call: Any) -> bool:
    while isinstance(call, partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004  # inspected, not called


def _load(name: str, folder: str | PathLike[str] | None) -> Any:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise AgentError(f"Invalid agent name {name!r}: write module:function, such as agents.math:run.")
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module exists, but one of its imports does not
        raise AgentError(f"No module {module!r}: run in its folder, or set PYTHONPATH.") from error
    except SystemExit as error:
        raise AgentError(
            f"Module {module!r} raised {error!r} while it was imported: remove the exit from the module."
        ) from error
    for part in function.split("."):
        if not hasattr(found, part):
            raise AgentError(f"Module {module!r} has no {function!r}.")
        found = getattr(found, part)
    return found
