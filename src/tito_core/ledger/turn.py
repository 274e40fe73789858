"""A turn: one request to the engine and its committed answer, frozen."""

from __future__ import annotations

import math
import uuid as uuid_module
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Any, NamedTuple

from tito_core.ledger.columns import Column, Columns, Logprobs, TokenIds, VocabularyCheck
from tito_core.ledger.json_values import plain
from tito_core.ledger.provenance import Provenances


class Reason(StrEnum):
    """Why a history branched (law 8)."""

    EDIT = "edit"  # a message changed, or an assistant message appeared that was not sampled here
    TRIM = "trim"  # messages were removed
    SUMMARY = "summary"  # several messages were replaced by one
    REWIND = "rewind"  # the agent returned to an earlier turn and got another message
    RETRY = "retry"  # the same messages were sent again
    OPENING = "new system prompt or tools"
    THINKING = "thinking stripped"
    SEPARATE = "separate agent"
    SIDE_CALL = "side call"  # a call outside any agent's conversation, such as a summary


OF_ONE_AGENT = frozenset(Reason) - {Reason.SEPARATE, Reason.SIDE_CALL}
"""Reasons that a change of one agent's own history can have."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A link from the first turn of a new path to the older path that it left.

    Attributes:
        reason: Why the path branched.
        turn: The last turn whose content both paths share, or the agent's own last turn if they share none (after a
            trim, for example). None if the path left no other path.
        message: Index of the first message that differs, or None.
        detail: For `OPENING`, the part of the opening that differs; empty otherwise.
    """

    reason: Reason
    turn: int | None = None
    message: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        words = [str(self.reason) + (f" ({self.detail})" if self.detail else "")]
        if self.turn is not None:
            words.append(f"from turn {self.turn}")
        if self.message is not None:
            words.append(f"at message {self.message}")
        return ", ".join(words)


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


REWARD = "reward"
"""Name of the annotation that holds a rollout's reward."""


def as_reward(value: Any) -> float:
    """Return a reward as a float: a finite number of Python, NumPy or torch, or a bool.

    Raises:
        ValueError: It is something else, such as text, a list, or NaN.
    """
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):  # such as an array of several numbers
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"The reward {value!r:.200} is not a finite number: pass a float. Keep several scores, or text, as "
            "annotations of other names."
        )
    return number


def new_uuid() -> str:
    """Return a random UUID."""
    return str(uuid_module.uuid4())


@dataclass(frozen=True, slots=True)
class Header:
    """The identity of a rollout, fixed when it begins.

    Attributes:
        uuid: UUID in canonical form: lower case, 36 characters.
        group_id: Shared by the rollouts of one prompt, such as a GRPO group.
        task_id: The task of the rollout.
        tokenizer: Name of the policy's tokenizer. Viewers use it to decode tokens.
        user: The user's own JSON values.
        certificate: Certificate of the chat template that renders the prompts, with the hashes of template and
            tokenizer. None if unknown.
        vocabulary: How the tokenizer was compared with the server's. None if no policy made the ledger.

    Raises:
        ValueError: `uuid` is not a canonical UUID, or a value does not fit in JSON.
        TypeError: A name is not a string, or a value is not JSON.
    """

    uuid: str
    group_id: str | None = None
    task_id: str | None = None
    tokenizer: str | None = None
    user: Mapping[str, Any] = field(default_factory=dict)
    certificate: Mapping[str, Any] | None = None
    vocabulary: VocabularyCheck | None = None

    @property
    def media_ids(self) -> tuple[int, ...]:
        """Ids of media placeholders, as the certificate names them; empty if it names none."""
        listed = (self.certificate or {}).get("media_ids")
        listed = listed if isinstance(listed, Sequence) else ()  # a file may hold any JSON
        return tuple(token for token in listed if type(token) is int and 0 <= token < 2**31)

    def __post_init__(self) -> None:
        try:
            canonical = str(uuid_module.UUID(self.uuid))
        except (ValueError, AttributeError, TypeError):
            canonical = None
        if canonical is None or canonical != self.uuid:
            raise ValueError(f"{self.uuid!r} is not a canonical UUID, such as {new_uuid()}.")
        for name in ("group_id", "task_id", "tokenizer"):
            if not isinstance(value := getattr(self, name), str | None):
                raise TypeError(f"{name} is {value!r}; it must be a string, such as {str(value)!r}, or None.")
            plain(value, name)
        object.__setattr__(self, "user", plain(self.user, "user"))  # a copy, which the caller cannot change
        if self.certificate is not None:
            object.__setattr__(self, "certificate", plain(self.certificate, "certificate"))
        if self.vocabulary is not None:
            object.__setattr__(self, "vocabulary", VocabularyCheck(self.vocabulary))


@dataclass(frozen=True, slots=True)
class Annotation:
    """A value that is added to a rollout later. Annotations are only added; the last one of a name counts.

    Attributes:
        name: For example "reward" or "termination".
        value: JSON: a number, a string, a list, a mapping.
        turn: The turn that it describes, or None for the whole rollout.

    Raises:
        TypeError: The name is not a string, or the value is not JSON.
        ValueError: The value does not fit in JSON.
    """

    name: str
    value: Any
    turn: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"An annotation's name is {self.name!r}; it must be a string.")
        plain(self.name, "the name of an annotation")
        object.__setattr__(self, "value", plain(self.value, self.name))


_PNG = b"\x89PNG\r\n\x1a\n"
_HEADER = _PNG + b"\0\0\0\rIHDR"
"""How a PNG file begins; its width and height follow, 4 bytes each."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Image:
    """An image.

    Attributes:
        data: The bytes that travel: a PNG, JPEG, GIF or WebP file, upright, opaque and RGB.
        format: "png", "jpeg", "gif" or "webp".
        width: In pixels.
        height: In pixels.
        sha256: Digest of `data`, 32 bytes; computed, so that it cannot differ from the bytes.

    Raises:
        ValueError: `format` is not a name of ASCII letters and digits, as `data:` URLs need, or the bytes are a PNG of
            another size or without its header.
    """

    data: bytes
    format: str
    width: int
    height: int
    sha256: bytes = field(init=False)

    def __post_init__(self) -> None:
        if not (self.format.isascii() and self.format.isalnum()):
            raise ValueError(f"The format of an image must be a name such as 'png', not {self.format[:40]!r}.")
        object.__setattr__(self, "data", b"".join([self.data]))  # plain: encoders refuse subclasses (numpy.bytes_)
        if self.data.startswith(_PNG):
            if not self.data.startswith(_HEADER) or len(self.data) < len(_HEADER) + 8:
                raise ValueError(
                    f"The bytes begin as a PNG file, but its header is incomplete or wrong: {self.data[:24].hex()}. "
                    "Give the whole file."
                )
            size = tuple(int.from_bytes(self.data[at : at + 4]) for at in (len(_HEADER), len(_HEADER) + 4))
            if (self.format, self.width, self.height) != ("png", *size):
                raise ValueError(
                    f"The bytes are a PNG of {size[0]} x {size[1]} pixels, but the image is described as "
                    f"{self.format} of {self.width} x {self.height}. Correct the format and size."
                )
        object.__setattr__(self, "sha256", sha256(self.data).digest())

    def __repr__(self) -> str:
        return f"<Image {self.sha256.hex()[:12]}: {self.format}, {self.width} x {self.height}, {len(self.data)} bytes>"
