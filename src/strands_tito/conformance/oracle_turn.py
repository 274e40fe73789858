"""A turn as the oracle reads it: plain lists."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

Problem = tuple[str, str]
"""A check's name and a sentence."""


@dataclass
class OracleTurn:
    """One turn as the ledger tells it; its optional columns by name, each with the place of its first row."""

    index: int
    parent: int | None
    prompt: list[int]
    provenance: list[int]
    output: list[int]
    logprobs: list[float]
    finish: str
    stop: int | str | None
    request: str
    cached_tokens: int | None
    versions: list[tuple[int, int, str | None]]
    constrained: bool
    max_new_tokens: int
    optional_outputs: list[str] = field(default_factory=list)
    columns: dict[str, tuple[int, list[Any]]] = field(default_factory=dict)


def float32(value: float | None) -> float | None:
    """Round to float32, as ledgers keep numbers."""
    return None if value is None else struct.unpack("f", struct.pack("f", value))[0]
