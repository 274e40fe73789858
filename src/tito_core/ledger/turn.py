"""A turn: one request to the engine and its committed answer, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from tito_core.ledger.branch import Branch
from tito_core.ledger.columns import Column, Columns, Logprobs, TokenIds
from tito_core.ledger.provenance import Provenance, Provenances

_NO_EXTRAS: Mapping[str, Column] = MappingProxyType({})


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
    """Weights that sampled tokens `start` to `stop`; None where the engine did not say.

    Offsets count from the first output token of a turn, or in a trajectory from its first token.
    """

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


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Placeholder tokens of an image or another medium.

    Attributes:
        offset: First token, counted from the start of the path.
        length: Number of tokens.
        sha256: Digest of the medium's bytes, 32 bytes.
    """

    offset: int
    length: int
    sha256: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Everything of a turn before it has a place in a ledger. Built aside, committed whole (law 5).

    Attributes:
        parent: Index of the turn that this one extends, or None for a new root.
        columns: Tokens, logprobs and provenance of the delta and the output.
        constrained: Whether a grammar was in force, which makes the whole output `CONSTRAINED`.
        prompt_length: Tokens of the whole prompt as the engine reported them, path included.
        finish: Why sampling stopped.
        stop: The stop token id or stop string that ended it, or None.
        fingerprint: Digest of the history up to and including the answer, as Strands stores it.
        sampling: Sampling parameters as sent, JSON-compatible, all but `max_new_tokens`.
        max_new_tokens: What the context left room for, or the user's own limit.
        calls: Tool calls, in order.
        reasoning_closed: False when the output ends inside a reasoning block.
        engine: The engine's record.
        branch: Why this turn does not simply follow the latest one, or None when it does.
        extras: Optional columns by name.
        media: Spans of media among the prompt's tokens.
    """

    parent: int | None
    columns: Columns
    constrained: bool
    prompt_length: int
    finish: Finish
    stop: int | str | None
    fingerprint: bytes
    sampling: Mapping[str, Any]
    max_new_tokens: int
    calls: tuple[CallRecord, ...]
    engine: EngineRecord
    reasoning_closed: bool = True
    branch: Branch | None = None
    extras: Mapping[str, Column] = field(default_factory=lambda: _NO_EXTRAS)
    media: tuple[MediaSpan, ...] = ()

    @property
    def prompt_ids(self) -> TokenIds:
        """The delta: prompt tokens added after the parent's last token, shape (p,)."""
        return self.columns.prompt_ids

    @property
    def prompt_provenance(self) -> Provenances:
        """One value for each of `prompt_ids`, shape (p,)."""
        return self.columns.prompt_provenance

    @property
    def output_ids(self) -> TokenIds:
        """Tokens the engine reported, shape (n,)."""
        return self.columns.output_ids

    @property
    def logprobs(self) -> Logprobs:
        """One for each of `output_ids`, shape (n,)."""
        return self.columns.logprobs

    @property
    def parse_status(self) -> str:
        """How the output was read: "ok", "malformed", "truncated" or "unclosed reasoning"."""
        statuses = {call.status for call in self.calls}
        for worst in ("malformed", "truncated"):
            if worst in statuses:
                return worst
        return "ok" if self.reasoning_closed else "unclosed reasoning"


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A committed turn: a draft and its place in the ledger.

    Attributes:
        index: Its place in commit order.
        draft: Its content.
        path_length: Tokens from the root to its end.
        sampling_of: First turn with the same sampling parameters; its own index when it is the first.
        server_of: First turn that the same server answered with the same logprob semantics.
        call_ids: Tool-call ids that the ledger had given out when the turn was committed.
    """

    index: int
    draft: Draft
    path_length: int
    sampling_of: int
    server_of: int
    call_ids: int

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
        return self.draft.columns.prompt + self.draft.columns.output
