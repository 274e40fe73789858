"""What rollouts are collected for: one JSON object a line, read as a stream and checked before anything is run."""

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
"""The key whose value an agent is asked."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes:
        id: Its own `id`, or `line-17` where it has none.
        value: The whole JSON object.
        digest: 16 hexadecimal digits of the SHA-256 of `value`, its keys in order.
    """

    id: str
    value: Mapping[str, Any]
    digest: str


class Source(Protocol):
    """Where tasks come from, as often as they are asked for."""

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield each task's line, from 1, and its object."""


class Tasks:
    """Tasks that are sound and have different ids. They are read anew each time, and never all held.

    Args:
        source: Where they come from.
        name: What to call it in errors.
        need_prompt: Whether each must have a `prompt`, a string or a list.

    Raises:
        TaskError: One is not sound; names its line.
    """

    def __init__(self, source: Source, name: str, *, need_prompt: bool = False) -> None:
        self._source, self._name, self._need_prompt = source, name, need_prompt
        lines: dict[bytes, int] = {}
        for line, value in self._source:
            task = self._task(line, value)
            before = lines.setdefault(hashlib.blake2b(task.id.encode(), digest_size=16).digest(), line)
            if before != line:
                raise TaskError(f"{name}, line {line}: the id {task.id!r} is that of line {before} already.")
        self._count = len(lines)
        if not lines:
            raise TaskError(f"{name} holds no task: write one JSON object a line.")

    @classmethod
    def of(
        cls, given: str | PathLike[str] | Iterable[Mapping[str, Any]] | Tasks, *, need_prompt: bool = False
    ) -> Tasks:
        """Take a JSONL file's path, or objects.

        Raises:
            TaskError: As the class; also when there is no such file.
        """
        if isinstance(given, Tasks):
            return given if given._need_prompt or not need_prompt else cls(given._source, given._name, need_prompt=True)
        if isinstance(given, str | PathLike):
            return cls(_File(Path(given)), str(given), need_prompt=need_prompt)
        return cls(_Given(list(given)), "The tasks", need_prompt=need_prompt)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Task]:
        for line, value in self._source:
            yield self._task(line, value)

    def _task(self, line: int, value: Mapping[str, Any]) -> Task:
        where = f"{self._name}, line {line}"
        if not isinstance(value, Mapping):
            raise TaskError(f"{where}: a task is a JSON object, and this is of type {type(value).__name__}.")
        given = value.get("id")
        if isinstance(given, bool) or not isinstance(given, str | int | None) or given == "":
            raise TaskError(f"{where}: the id {given!r} must be a string or a whole number.")
        prompt = value.get(PROMPT)
        if self._need_prompt and not (isinstance(prompt, str | list) and prompt):
            raise TaskError(
                f"{where}: the agent is asked the task's {PROMPT!r}, which must be a string or a list of content "
                f"blocks, and is {prompt!r}. Name an `async def run(model, task)` to ask it yourself."
            )
        try:
            canonical = msgspec.json.encode(value, order="deterministic")
        except (TypeError, ValueError, RecursionError) as error:
            raise TaskError(f"{where}: the task is not JSON: {error}.") from error
        return Task(f"line-{line}" if given is None else str(given), value, hashlib.sha256(canonical).hexdigest()[:16])


@dataclass(frozen=True, slots=True)
class _Given:
    values: list[Mapping[str, Any]]

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return enumerate(self.values, 1)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path

    def __iter__(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        try:
            with self.path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    said = line.removeprefix(_BOM) if number == 1 else line
                    if said.strip():
                        yield number, self._object(number, said)
        except OSError as error:
            raise TaskError(f"{self.path} cannot be read: {error.strerror}.") from error

    def _object(self, number: int, line: bytes) -> Mapping[str, Any]:
        try:
            value: Mapping[str, Any] = msgspec.json.decode(line)
        except UNREADABLE as error:
            raise TaskError(f"{self.path}, line {number} is not JSON: {error}.") from error
        return value
