"""What went over the wire, in words that every engine's reader shares; each reader is in its engine's package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Seen(Protocol):
    """What the oracle reads of an exchange."""

    path: str
    headers: dict[str, str]
    sent: bytes
    status: int | None
    got: bytearray
    whole: bool


@dataclass
class Heard:
    """One generation as the wire tells it. What an engine does not say is None.

    Beside each token of the output: `top`, the likeliest as (id, logprob), and `masks`, the ids that were left to
    choose from. `scored` are (id, logprob) of the prompt, up to its end; `experts` is base64.
    """

    name: str
    prompt: list[int]
    sampling: dict[str, Any]
    echoed: list[int] | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    logprob_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: int | str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    versions: list[tuple[int, int, str | None]] | None = None
    text: str | None = None
    top: list[list[tuple[int, float | None]]] | None = None
    scored: list[tuple[int, float | None]] = field(default_factory=list)
    experts: str | None = None
    masks: list[list[int]] | None = None


Read = Callable[[Seen], Heard | None]
"""Reads one whole, successful exchange; None where it is no generation."""


def generations(read: Read, exchanges: Iterable[Seen]) -> list[Heard]:
    """Read every whole, successful generation; scores and what the server was asked about itself are left out.

    Args:
        read: The reader of the engine's wire.
        exchanges: What went over it.
    """
    sound = [exchange for exchange in exchanges if exchange.status == 200 and exchange.whole and exchange.sent]
    return [heard for exchange in sound if (heard := read(exchange)) is not None]


def documents(exchange: Seen) -> list[Any]:
    """Return an answer's JSON documents: one, or one for each event of a stream."""
    text = exchange.got.decode()
    if not text.lstrip().startswith("data:"):
        return [json.loads(text)]
    lines = (line[5:].strip() for line in text.splitlines() if line.startswith("data:"))
    return [json.loads(line) for line in lines if line != "[DONE]"]
