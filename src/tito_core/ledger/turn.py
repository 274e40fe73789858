"""A turn: one request to the engine and its committed answer, frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from tito_core.ledger.branch import Branch
from tito_core.ledger.columns import Column, Columns, Logprobs, TokenIds
from tito_core.ledger.provenance import Provenances


class Finish(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # by the engine, as a trainer asked it to; kept only where a user wants the part that is there

    @property
    def cut_off(self) -> bool:
        """Whether something else than the policy ended the answer."""
        return self is not Finish.STOP


class Sampling(Mapping[str, Any]):
    """Sampling parameters as sent, JSON-compatible, all but `max_new_tokens`. A ledger holds equal ones once.

    Attributes:
        parameters: The parameters.
        first: The turn that had them first.
    """

    __slots__ = ("first", "parameters")

    def __init__(self, parameters: Mapping[str, Any], first: int = 0) -> None:
        self.parameters = dict(parameters)
        self.first = first

    def __getitem__(self, name: str) -> Any:
        return self.parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __repr__(self) -> str:
        return f"Sampling({self.parameters!r})"


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
        """Return whether teacher-forced scoring (raw, temperature 1) gives the same number."""
        return self.temperature == 1.0 and not self.adjusted


class Server:
    """What stays while one server answers alike. A ledger holds equal ones once.

    Attributes:
        backend: Name of the backend.
        model: The model's name on the server.
        semantics: What its logprobs mean.
        first: The turn that it answered first.
    """

    __slots__ = ("backend", "first", "model", "semantics")

    def __init__(self, backend: str, model: str, semantics: Semantics, first: int = 0) -> None:
        self.backend = backend
        self.model = model
        self.semantics = semantics
        self.first = first

    def __repr__(self) -> str:
        return f"Server({self.backend!r}, {self.model!r}, {self.semantics!r})"


class VersionSpan(NamedTuple):
    """Weights that sampled tokens `start` to `stop`; None where the engine did not say.

    Offsets count from the first output token of a turn, or in a trajectory from its first token.
    """

    start: int
    stop: int
    version: str | None


class ResponseSpan(NamedTuple):
    """Output tokens `start` to `stop` of a turn, which came in one response of the engine (law 4).

    Attributes:
        start: First token, counted from the first output token.
        stop: One past its last token.
        request_id: The engine's name for the request.
    """

    start: int
    stop: int
    request_id: str


class CallRecord(NamedTuple):
    """One tool call as the policy's tokens say it.

    Attributes:
        name: The tool's name, or None where the tokens do not say it for certain.
        status: "ok", "lenient", "malformed", "truncated", or "suspect" for text that only looks like a call.
        start: First token of the call, as an offset within the turn's output.
        stop: One past its last token.
        reason: Why it is not "ok", as a sentence; empty otherwise.
    """

    name: str | None
    status: str
    start: int
    stop: int
    reason: str = ""


class MediaSpan(NamedTuple):
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
class EngineRecord:
    """What only this engine and this run know of a turn; everything else is equal on every backend (law 13).

    Attributes:
        server: Who answered, and what its logprobs mean.
        request_id: The engine's name for the request, the last one of a turn that was resumed.
        latency_s: Seconds from sending to the whole answer.
        cached_tokens: Prompt tokens that the engine had in its prefix cache, or None when it did not say.
        versions: Weight versions that tile the output (law 10).
        responses: The responses that tile the output of a turn that was resumed; empty where one response is all.
    """

    server: Server
    request_id: str
    latency_s: float
    cached_tokens: int | None
    versions: tuple[VersionSpan, ...]
    responses: tuple[ResponseSpan, ...] = ()

    @property
    def semantics(self) -> Semantics:
        """What the logprobs mean (law 11)."""
        return self.server.semantics


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Everything of a turn before it has a place in a ledger. Built aside, committed whole (law 5).

    Attributes:
        columns: Tokens, logprobs and provenance of the delta and the output.
        prompt_length: Tokens of the whole prompt as the engine reported them, path included.
        finish: Why sampling stopped.
        fingerprint: Digest of the history up to and including the answer, as Strands stores it.
        sampling: Sampling parameters as sent.
        max_new_tokens: What the context left room for, or the user's own limit.
        engine: The engine's record.
        parent: Index of the turn that this one extends, or None for a new root.
        stop: The stop token id or stop string that ended it, or None.
        constrained: Whether a grammar was in force, which makes the whole output `CONSTRAINED`.
        calls: Tool calls, in order.
        call_ids: Tool-call ids that the ledger had given out when the turn was committed, which sets it.
        reasoning_closed: False when the output ends inside a reasoning block.
        branch: Why this turn does not simply follow the latest one, or None when it does.
        extras: Optional columns by name.
        media: Spans of media among the prompt's tokens.
    """

    columns: Columns
    prompt_length: int
    finish: Finish
    fingerprint: bytes
    sampling: Sampling
    max_new_tokens: int
    engine: EngineRecord
    parent: int | None = None
    stop: int | str | None = None
    constrained: bool = False
    calls: tuple[CallRecord, ...] = ()
    call_ids: int = 0
    reasoning_closed: bool = True
    branch: Branch | None = None
    extras: Mapping[str, Column] = field(default_factory=dict)
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


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A committed turn: a draft and its place in the ledger.

    Attributes:
        index: Its place in commit order.
        draft: Its content.
        path_length: Tokens from the root to its end.
    """

    index: int
    draft: Draft
    path_length: int

    @property
    def parent(self) -> int | None:
        """Index of the turn this one extends, or None for a root."""
        return self.draft.parent

    @property
    def own_length(self) -> int:
        """Tokens that this turn added: delta and output."""
        columns = self.draft.columns
        return columns.prompt + columns.output
