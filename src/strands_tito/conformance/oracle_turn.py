"""A turn as the oracle reads it: plain lists."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

Problem = tuple[str, str, *tuple[int, ...]]
"""Name of a check, a sentence that says what is wrong, and the index of the output token, if it is about one."""


@dataclass(frozen=True)
class OracleImage:
    """An image of a path: the offset and number of its placeholders, counted from the path's start, and its digest."""

    offset: int
    length: int
    sha256: str


@dataclass
class OracleTurn:
    """One turn of the ledger.

    Attributes:
        index: Place in commit order.
        parent: Index of the parent, or None.
        delta_ids: Prompt ids that the turn adds after its parent's last token.
        provenance: One value for each delta id.
        output_ids: Sampled ids.
        logprobs: One for each output id.
        finish: Why the generation ended.
        stop: The stop id or stop string that ended it, or None.
        request_id: The request's id.
        cached_tokens: The server's count, or None.
        versions: Weight versions as (start, end, version) over the output ids.
        constrained: Whether the turn was sampled under a grammar.
        max_new_tokens: Limit of the request.
        optional_outputs: Names of the columns that were requested.
        columns: Optional columns by name: the position of the first row, and the rows.
        images: The images of the delta.
    """

    index: int
    parent: int | None
    delta_ids: list[int]
    provenance: list[int]
    output_ids: list[int]
    logprobs: list[float]
    finish: str
    stop: int | str | None
    request_id: str
    cached_tokens: int | None
    versions: list[tuple[int, int, str | None]]
    constrained: bool
    max_new_tokens: int
    optional_outputs: list[str] = field(default_factory=list)
    columns: dict[str, tuple[int, list[Any]]] = field(default_factory=dict)
    images: list[OracleImage] = field(default_factory=list)


def float32(value: float | None) -> float | None:
    """Round to float32, the precision of the ledger."""
    return None if value is None else struct.unpack("f", struct.pack("f", value))[0]
