"""Tasks, their rollouts, the user's agent that runs one, and what comes of it."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tito_core.ledger.errors import TITOError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import REWARD, as_reward
from tito_core.store.records import UNREADABLE
from tito_core.termination import ANNOTATION, Outcome, Termination, record_termination

if TYPE_CHECKING:
    from tito_core.model import TITOModel


class CollectError(TITOError, ValueError):
    """Rollouts cannot be collected with these arguments."""


class TaskError(CollectError):
    """A task is invalid, or has changed since its rollouts were collected."""


class AgentError(CollectError):
    """The agent cannot be imported, is not an agent, or returned an invalid value."""


def exit_error(error: SystemExit) -> AgentError:
    """Return the error of a collection that `sys.exit()` ended, in an asyncio task that the agent's code started."""
    return AgentError(
        f"The agent's code raised {error!r} in an asyncio task, which ends the collection. Raise an error instead. "
        "Finished rollouts are kept."
    )


class FolderError(CollectError):
    """The folder holds another collection, or another process writes to it."""


class TooManyFailuresError(CollectError):
    """Too many rollouts failed in a row."""


PROMPT = "prompt"
"""The key of a task's prompt."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes:
        id: Its own `id`, or `line-17` without one.
        value: The whole JSON object.
        digest: The first 16 hexadecimal digits of the SHA-256 of `value` with sorted keys.
    """

    id: str
    value: Mapping[str, Any]
    digest: str

    def copied(self) -> Mapping[str, Any]:
        """Return a deep copy of `value`, which a rollout's agent may change. Its strings and bytes are not copied.

        Raises:
            TaskError: The value cannot be copied.
        """
        try:
            return deepcopy(self.value)
        except Exception as error:  # of the value's own types too
            raise TaskError(
                f"Task {self.id!r} cannot be copied for its rollout ({type(error).__name__}: {error}): use JSON "
                "values, nested less deeply."
            ) from error


class Source(Protocol):
    """A source of tasks that can be iterated repeatedly."""

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the line number, from 1, and the object of each task."""


class Tasks:
    """Valid tasks with unique ids. They are read from the source at each iteration, not kept in memory.

    Args:
        source: The source of tasks.
        name: Name of the source, for errors.
        need_prompt: Whether each task must have a `prompt`, a string or a list.

    Raises:
        TaskError: A task is invalid; names its line.
    """

    def __init__(self, source: Source, name: str, *, need_prompt: bool = False) -> None:
        self._source, self._name, self._need_prompt = source, name, need_prompt
        lines: dict[bytes, int] = {}
        for line, value in self._source:
            task = self._task(line, value)
            before = lines.setdefault(hashlib.blake2b(task.id.encode(), digest_size=16).digest(), line)
            if before != line:
                raise TaskError(f"{name}, line {line}: line {before} has the same id {task.id!r}. Make ids unique.")
        self._count = len(lines)
        if not lines:
            raise TaskError(f"{name} holds no tasks: write one JSON object per line.")

    @classmethod
    def of(
        cls, tasks: str | PathLike[str] | Iterable[Mapping[str, Any]] | Tasks, *, need_prompt: bool = False
    ) -> Tasks:
        """Return the tasks of a JSONL file, given its path, or of objects.

        Raises:
            TaskError: As the class; also if the file does not exist.
        """
        if isinstance(tasks, Tasks):
            return tasks if tasks._need_prompt or not need_prompt else cls(tasks._source, tasks._name, need_prompt=True)
        if isinstance(tasks, str | PathLike):
            return cls(_JsonLines(Path(tasks)), str(tasks), need_prompt=need_prompt)
        return cls(_Objects(list(tasks)), "The tasks", need_prompt=need_prompt)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Task]:
        for line, value in self._source:
            yield self._task(line, value)

    def _task(self, line: int, value: Mapping[str, Any]) -> Task:
        where = f"{self._name}, line {line}"
        if not isinstance(value, Mapping):
            raise TaskError(f"{where}: a task must be a JSON object, not of type {type(value).__name__}.")
        own_id = value.get("id")
        if isinstance(own_id, bool) or not isinstance(own_id, str | int | None) or own_id == "":
            raise TaskError(f"{where}: the id {own_id!r} must be a string or a whole number.")
        prompt = value.get(PROMPT)
        if self._need_prompt and not (isinstance(prompt, str | list) and prompt):
            raise TaskError(
                f"{where}: {PROMPT!r} must be a string or a list of content blocks, not {prompt!r}, because the agent "
                "is a factory. Add a prompt, or use an `async def run(model, task)` that asks the agent itself."
            )
        try:
            canonical = msgspec.json.encode(value, order="deterministic")
        except (TypeError, ValueError, RecursionError) as error:
            raise TaskError(f"{where}: the task is not JSON: {error}.") from error
        return Task(
            f"line-{line}" if own_id is None else str(own_id), value, hashlib.sha256(canonical).hexdigest()[:16]
        )


@dataclass(frozen=True, slots=True)
class _Objects:
    values: list[Mapping[str, Any]]

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return enumerate(self.values, 1)


@dataclass(frozen=True, slots=True)
class _JsonLines:
    path: Path

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        try:
            with self.path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    text = line.removeprefix(_BOM) if number == 1 else line
                    if text.strip():
                        yield number, self._object(number, text)
        except OSError as error:
            raise TaskError(f"{self.path} cannot be read: {error.strerror}.") from error

    def _object(self, number: int, line: bytes) -> Mapping[str, Any]:
        try:
            value: Mapping[str, Any] = msgspec.json.decode(line)
        except UNREADABLE as error:
            raise TaskError(f"{self.path}, line {number} is not JSON: {error}.") from error
        return value


@dataclass(frozen=True, slots=True)
class Rollout:
    """One of a task's rollouts.

    Attributes:
        run: UUID of the collection.
        task: The task.
        sample: Number within the task's group, from 0.
    """

    run: str
    task: Task
    sample: int

    @property
    def group_id(self) -> str:
        """The group's name in ledgers; it differs between collections."""
        return f"{self.run[:8]}/{self.task.id}"

    @property
    def user(self) -> dict[str, Any]:
        """The `user` field of the ledger's header."""
        return {"run": self.run, "sample": self.sample, "task_digest": self.task.digest}

    def seed(self, base: int) -> int:
        """Return a sampling seed derived from `base`. With one seed for all, the rollouts of a group would be equal."""
        digest = hashlib.sha256(f"{base}/{self.sample}/{self.task.id}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout failed.

    Attributes:
        error: The error's type and message.
        traceback: The end of the traceback, at most 4,000 characters.
    """

    error: str
    traceback: str


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """The result of a rollout.

    Attributes:
        rollout: The rollout.
        ledger: Its ledger, with reward and termination as annotations.
        termination: Why it ended.
        failure: None if the rollout is finished, otherwise the error that ended it.
    """

    rollout: Rollout
    ledger: Ledger
    termination: Termination
    failure: Failure | None = None

    def settled(self) -> RolloutResult:
        """Return the result with a ledger of its own: a thread that outlives the run may still annotate the other.

        The turns are shared, so this takes 0.1 ms and 8 KiB for 50 turns. Unless the ledger has the result's
        termination, it is recorded.
        """
        load, parts = self.ledger.__reduce__()  # what it has at one moment; `copy` would copy each turn too
        ledger: Ledger = load(*parts)
        if ledger.annotation(ANNOTATION) != self.termination:
            record_termination(ledger, self.termination)
        return replace(self, ledger=ledger)


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
        # Stops tool servers, which otherwise live until garbage collection.
        cleanup = getattr(made, "cleanup", lambda: None)
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
