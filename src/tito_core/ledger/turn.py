"""A turn: one request to the engine and its committed answer, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from tito_core.ledger.provenance import Provenance, Provenances

TokenIds = npt.NDArray[np.int32]
"""Token ids, dtype int32, shape (n,)."""
Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities, dtype float32, shape (n,)."""


class Finish(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Semantics:
    """What a logprob means (law 11). `None` is unknown, never a guess.

    Attributes:
        processed: False when logprobs are log_softmax of the raw logits, True when the sampler's
            temperature was applied first.
        temperature: The temperature that the logprobs include; 1.0 for raw ones.
        adjusted: Whether something else may have changed the distribution first: a grammar, a penalty, a truncation.
        source: Who said so, for example "vllm 0.32.0, measured".
    """

    processed: bool | None
    temperature: float | None
    adjusted: bool
    source: str

    def comparable_with_scoring(self) -> bool:
        """Tell whether teacher-forced scoring (raw, temperature 1) gives the same number."""
        return self.temperature == 1.0 and not self.adjusted


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Weights that sampled output tokens `start` to `stop` (offsets within the turn's output)."""

    start: int
    stop: int
    version: str | None


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What only this engine and this run know of a turn; everything else is equal on every backend (law 13)."""

    backend: str
    model: str
    request_id: str
    latency_s: float
    cached_tokens: int | None
    semantics: Semantics
    versions: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One tool call as the policy's tokens say it.

    Attributes:
        name: The tool's name, or None where the tokens do not say it for certain.
        status: "ok", "malformed" or "truncated".
        start: First token of the call, as an offset within the turn's output.
        stop: One past its last token.
        reason: Why it is not "ok", as a sentence; empty otherwise.
    """

    name: str | None
    status: str
    start: int
    stop: int
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Everything of a turn before it has a place in a ledger. Built aside, committed whole (law 5).

    Attributes:
        parent: Index of the turn that this one extends, or None for a new root.
        prompt_ids: The delta: prompt tokens added after the parent's last token, shape (p,).
        prompt_provenance: One value for each of `prompt_ids`, shape (p,).
        output_ids: Tokens the engine reported, shape (n,).
        logprobs: One for each of `output_ids`, shape (n,).
        constrained: Whether a grammar was in force, which makes the whole output `CONSTRAINED`.
        prompt_length: Tokens of the whole prompt as the engine reported them, path included.
        finish: Why sampling stopped.
        stop: The stop token id or stop string that ended it, or None.
        fingerprint: Digest of the history up to and including the answer, as Strands stores it.
        sampling: Sampling parameters as sent, JSON-compatible.
        calls: Tool calls, in order.
        engine: The engine's record.
    """

    parent: int | None
    prompt_ids: TokenIds
    prompt_provenance: Provenances
    output_ids: TokenIds
    logprobs: Logprobs
    constrained: bool
    prompt_length: int
    finish: Finish
    stop: int | str | None
    fingerprint: bytes
    sampling: Mapping[str, Any]
    calls: tuple[CallRecord, ...]
    engine: EngineRecord


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A committed turn: a draft, its place in the ledger, and read-only arrays."""

    index: int
    draft: Draft
    path_length: int = field(repr=False)

    @property
    def parent(self) -> int | None:
        """Index of the turn this one extends, or None for a root."""
        return self.draft.parent

    @property
    def output_provenance(self) -> Provenance:
        """The one provenance of all output tokens."""
        return Provenance.CONSTRAINED if self.draft.constrained else Provenance.SAMPLED

    @property
    def own_length(self) -> int:
        """Tokens that this turn added: delta and output."""
        return len(self.draft.prompt_ids) + len(self.draft.output_ids)
