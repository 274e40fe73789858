"""The schema of a stored ledger: one record for its header, one a turn, one an annotation.

Records hold dicts, lists, str, int, float, bytes and None, so that any carrier takes them. Columns are little-endian
bytes, so that a reader in another language needs no numpy. A field that is absent has its default. `sampling` and
`server` are either the values or the index of the first turn that has the same ones.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

FORMAT = "strands-tito/ledger"
SCHEMA = 1


class HeaderRecord(TypedDict):
    """What begins a ledger."""

    uuid: str
    group_id: NotRequired[str]
    task_id: NotRequired[str]
    tokenizer: NotRequired[str]
    user: NotRequired[dict[str, Any]]


class SemanticsRecord(TypedDict):
    """What the logprobs mean."""

    processed: bool | None
    temperature: float | None
    adjusted: bool
    source: str


class ServerRecord(TypedDict):
    """What stays while one server answers alike."""

    backend: str
    model: str
    semantics: SemanticsRecord


class ColumnRecord(TypedDict):
    """An optional column: its first row's offset in the path, NumPy's name of its dtype, its shape, its bytes."""

    start: int
    dtype: str
    shape: list[int]
    data: bytes


class BranchRecord(TypedDict):
    """Why a turn does not simply follow the latest one."""

    reason: str
    turn: NotRequired[int]
    message: NotRequired[int]
    detail: NotRequired[str]


class TurnRecord(TypedDict):
    """One turn; what is not said here is said by `Draft`."""

    parent: NotRequired[int]
    prompt: int
    output: int
    columns: bytes
    reported: int
    finish: str
    stop: NotRequired[int | str]
    fingerprint: bytes
    sampling: dict[str, Any] | int
    max_new_tokens: int
    call_ids: NotRequired[int]
    calls: NotRequired[list[tuple[str | None, str, int, int, str]]]
    constrained: NotRequired[bool]
    reasoning_open: NotRequired[bool]
    branch: NotRequired[BranchRecord]
    extras: NotRequired[dict[str, ColumnRecord]]
    media: NotRequired[list[tuple[int, int, bytes]]]
    server: NotRequired[ServerRecord | int]
    request: NotRequired[str]
    latency_s: NotRequired[float]
    cached: NotRequired[int]
    versions: NotRequired[list[tuple[int, str | None]]]


class AnnotationRecord(TypedDict):
    """One annotation."""

    name: str
    value: Any
    turn: NotRequired[int]


class LedgerRecord(TypedDict):
    """A whole ledger in one value, for carriers that are no file of ours."""

    format: str
    schema: int
    header: HeaderRecord
    turns: list[TurnRecord]
    annotations: list[AnnotationRecord]
