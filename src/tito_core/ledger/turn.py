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
    ABORT = "abort"  # the engine aborted it, for a trainer; committed only with on_abort="commit"

    @property
    def cut_off(self) -> bool:
        """Whether the answer ended by something else than the policy's own stop."""
        return self is not Finish.STOP


class Sampling(Mapping[str, Any]):
    """Sampling parameters as sent, without `max_new_tokens`. JSON-compatible. Turns of a ledger share equal ones.

    Attributes:
        parameters: The parameters.
        first: The first turn that had them.
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
    """What a logprob means (law 11). `None` means unknown.

    Attributes:
        processed: False if logprobs are log_softmax of the raw logits, True if the sampler's temperature was applied
            first.
        temperature: The temperature that the logprobs include; 1.0 for raw ones.
        adjusted: Whether something else may have changed the distribution first: a grammar, a penalty, a truncation.
        source: Where this information comes from, for example "vllm 0.32.0, measured".
    """

    processed: bool | None
    temperature: float | None
    adjusted: bool
    source: str

    def comparable_with_scoring(self) -> bool:
        """Return whether teacher-forced scoring (raw, temperature 1) gives the same number."""
        return self.temperature == 1.0 and not self.adjusted


class Server:
    """A server, as far as turns have it in common. Turns of a ledger share equal ones.

    Attributes:
        backend: Name of the backend.
        model: The model's name on the server.
        semantics: What its logprobs mean.
        first: The first turn that it answered.
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
    """The weight version that sampled tokens `start` to `stop`; None if the engine did not report it.

    In a turn, offsets count from its first output token; in a trajectory, from the first token of the path.
    """

    start: int
    stop: int
    version: str | None


class ResponseSpan(NamedTuple):
    """Output tokens `start` to `stop` of a turn: those of one engine response (law 4).

    Attributes:
        start: First token, counted from the first output token.
        stop: One past its last token.
        request_id: The engine's name for the request.
    """

    start: int
    stop: int
    request_id: str


class CallRecord(NamedTuple):
    """One tool call, as parsed from the policy's tokens.

    Attributes:
        name: The tool's name, or None if the tokens do not determine it.
        status: "ok", "lenient", "malformed", "truncated", or "suspect" for text that only looks like a call.
        start: First token of the call, as an offset within the turn's output.
        stop: One past its last token.
        reason: Why the status is not "ok", as a sentence; empty otherwise.
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
        format: Such as "png"; empty if unknown.
        width: In pixels; 0 if unknown.
        height: In pixels; 0 if unknown.
    """

    offset: int
    length: int
    sha256: bytes
    format: str = ""
    width: int = 0
    height: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EngineRecord:
    """The part of a turn that depends on engine and run. All other parts are equal on every backend (law 13).

    Attributes:
        server: The server, and what its logprobs mean.
        request_id: The engine's name for the request; the last one if the turn was resumed.
        latency_s: Seconds from sending the request to the end of the response.
        cached_tokens: Prompt tokens found in the engine's prefix cache, or None if the engine did not report them.
        versions: Weight versions that tile the output (law 10).
        responses: The responses that tile the output of a resumed turn; empty if one response holds it all.
        finish_word: The server's own word for why sampling stopped, where it is none of `Finish`; else None.
        unordered: The answer was streamed, and nothing in its events showed their order.
    """

    server: Server
    request_id: str
    latency_s: float
    cached_tokens: int | None
    versions: tuple[VersionSpan, ...]
    responses: tuple[ResponseSpan, ...] = ()
    finish_word: str | None = None
    unordered: bool = False

    @property
    def semantics(self) -> Semantics:
        """What the logprobs mean (law 11)."""
        return self.server.semantics


NEW_AGENT = ""
"""A draft's `agent` before its commit, when a new agent without a name made the turn. The commit names it."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """The content of a turn that is not committed yet. It is committed whole or not at all (law 5).

    Attributes:
        columns: Tokens, logprobs and provenance of the delta and the output.
        prompt_length: Length of the whole prompt, path included, as the engine reported it.
        finish: Why sampling stopped.
        fingerprint: Digest of the history up to and including the answer, as Strands stores it.
        sampling: Sampling parameters as sent.
        max_new_tokens: The user's limit, or the room that the context left.
        engine: The engine's record.
        parent: Index of the turn that this one extends, or None for a new root.
        stop: The stop token id or stop string that ended it, or None.
        constrained: Whether the request had a grammar, which makes the whole output `CONSTRAINED`.
        calls: Tool calls, in order.
        call_ids: Number of tool-call ids that the ledger had generated by then. The commit sets it.
        reasoning_closed: False if the output ends inside a reasoning block.
        branch: Why this turn does not simply follow the latest one, or None if it does.
        extras: Optional columns by name.
        media: Spans of media placeholders in the delta.
        agent: The agent that made the turn: its name, or "agent-N" for one without a name whose first turn is N. None
            for a call outside any agent, such as a summary of the history, and in ledgers of schema 1.
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
    agent: str | None = None

    @property
    def prompt_ids(self) -> TokenIds:
        """The delta: ids of the prompt tokens after the parent's last token, shape (p,)."""
        return self.columns.prompt_ids

    @property
    def prompt_provenance(self) -> Provenances:
        """Provenance of `prompt_ids`, shape (p,)."""
        return self.columns.prompt_provenance

    @property
    def output_ids(self) -> TokenIds:
        """Ids that the engine reported, shape (n,)."""
        return self.columns.output_ids

    @property
    def logprobs(self) -> Logprobs:
        """Logprobs of `output_ids`, shape (n,)."""
        return self.columns.logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A committed turn: a draft with its place in the ledger.

    Attributes:
        index: Its position in commit order.
        draft: Its content.
        path_length: Number of tokens from the root to its end.
    """

    index: int
    draft: Draft
    path_length: int

    @property
    def parent(self) -> int | None:
        """Index of the turn that this one extends, or None for a root."""
        return self.draft.parent

    @property
    def own_length(self) -> int:
        """Number of tokens that this turn added: delta and output."""
        columns = self.draft.columns
        return columns.prompt + columns.output
