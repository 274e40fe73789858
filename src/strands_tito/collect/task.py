"""Tasks: one JSON object per line, read as a stream and checked before anything is run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import msgspec

from strands_tito.collect.errors import TaskError
from tito_core.store.records import UNREADABLE

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
