"""The backend protocol: requests to an engine, and its responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol, TypeAlias, get_args, get_type_hints, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import Field, StrictBool, field_validator, model_validator

from tito_core.backend.errors import ProtocolViolationError, UnsupportedByServerError, hidden
from tito_core.backend.id_text import IdText
from tito_core.backend.images import NO_IMAGES, ImageSupport, PromptImages
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.values import InvalidValueError, TypedValues, checked_names, is_text, refuse_unknown, short_repr
from tito_core.ledger.columns import Column, Logprobs, TokenIds
from tito_core.ledger.turn import Adapter, Finish, ResponseSpan, VersionSpan


@runtime_checkable
class Backend(Protocol):
    """One engine, token ids in and token ids out. Stateless between calls; safe for many concurrent ones.

    A backend class is built with `(base_url, *, model=None, api_key=None, timeout_s=..., patience_s=...)`. The core
    checks requests before it calls a backend, and validates responses after it: a backend does neither.
    """

    @property
    def name(self) -> str:
        """Name of the engine in errors and ledgers."""

    async def connect(self) -> EngineInfo:
        """Query the server's properties. Later calls return the first result."""

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample a completion of `request.input_ids`.

        A generation that is lost or cancelled is aborted on the engine.

        Args:
            request: Its ids, sampling parameters and length are already checked.
            on_chunk: Makes the engine stream and receives the chunks; the response is the same. After the first chunk
                the request is not retried. A backend without the parameter never streams.

        Returns:
            The whole completion, or the tokens up to an abort.

        Raises:
            BackendError: Its subclass says how the request failed; no partial result is returned.
        """

    async def score(self, token_ids: TokenIds) -> RawScores:
        """Score a sequence teacher-forced: log p(token i | tokens before i), raw, at temperature 1.

        A backend with `Capabilities.adapters` also takes `adapter: Adapter | None = None`, whose weights score, and
        `ImageScorer.score_with_images` too.

        Args:
            token_ids: int32, shape (n,), checked.

        Raises:
            UnsupportedByServerError: The server cannot score.
        """

    async def tokenize(self, text: str) -> Integers | None:
        """Encode text with the server's own tokenizer, without a BOS or EOS of its own (law 15).

        Returns:
            The ids; None if the server cannot encode text or does not allow it.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a generation on the engine. Unknown ids are ignored."""

    async def aclose(self) -> None:
        """Close this event loop's connections."""


@runtime_checkable
class ImageScorer(Protocol):
    """The optional method of a backend that can score a sequence with images."""

    async def score_with_images(self, token_ids: TokenIds, images: PromptImages) -> RawScores:
        """Score a sequence with images; see `Backend.score`.

        Args:
            token_ids: int32, shape (n,), checked; collapsed.
            images: Its images, with all their lengths. The scores are those of the expanded sequence.
        """


@runtime_checkable
class IdScorer(Protocol):
    """The optional method of a backend whose server may score given ids in the place of each token of a sequence."""

    async def score_ids(self, token_ids: TokenIds, of: TokenIds) -> RawScores:
        """Score a sequence and, in the same pass, given ids as its next tokens: `RawScores.of_ids`.

        Args:
            token_ids: See `Backend.score`.
            of: The given ids, int32, shape (k,), checked.
        """


OnAbort = Literal["resume", "discard", "commit"]
"""What follows a generation that the engine aborts: resume from the sampled tokens, an error, or the partial answer."""
Running = Literal["keep", "abort"]
"""Whether a pause keeps running generations, which continue afterwards, or aborts them."""


@runtime_checkable
class EngineAdmin(Protocol):
    """Optional methods of a backend whose server can change its weights, and load LoRA adapters.

    A training loop calls them, a rollout never does.
    """

    @property
    def name(self) -> str:
        """See `Backend.name`."""

    async def pause(self, running: Running = "keep") -> None:
        """Pause all generations until `resume`; new ones wait. Caches computed with the current weights are cleared."""

    async def resume(self) -> None:
        """Continue generation after a pause."""

    async def load_weights(
        self, path: str, version: str, *, running: Running = "keep", images_uncached: bool = False
    ) -> None:
        """Pause, load the weights from a folder that the server can read, set their version, and resume.

        A generation that continues after the change reports which tokens came from which version (law 10).

        Args:
            path: The folder.
            version: Their name.
            running: See `pause`.
            images_uncached: The caller guarantees that the server keeps no features of images from before. Needed
                where a server that takes images may keep them; others ignore it.

        Raises:
            UnsupportedByServerError: The server may keep features of images that the old weights computed.
            WeightsNotLoadedError: The server failed to load them. It stays paused, as its weights may be incomplete.
        """

    async def weight_version(self) -> str | None:
        """Return the version of the loaded weights, or None if the server does not report it."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder that the server can read. Running requests go on.

        Args:
            name: Its name in requests, a new one for each version of its weights.
            path: The folder, as PEFT writes it.

        Raises:
            BadRequestError: The name is or was in use, the server takes no adapters, or cannot load this one.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Its name cannot be used again."""


MOST_TOP_LOGPROBS = 1024
"""Bound on `top_logprobs`, to protect a server's memory. SGLang has none, and crashes past its vocabulary size."""
_SALT_FORBIDDEN = frozenset("@/\\\0")
Size = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class OptionalOutputs(TypedValues):
    """The optional outputs of a rollout, the same in each turn. All are off by default, as they cost bytes and time.

    Attributes:
        top_logprobs: Number k of most likely tokens per sampled token: columns `top_ids` and `top_logprobs`, shape
            (n, k), most likely first. They have the semantics of the sampled tokens' logprobs (law 11).
        prompt_logprobs: Logprobs of each turn's own prompt tokens: column `prompt_logprobs`, shape (p,), raw and at
            temperature 1 on every engine. The first token of a history has none.
        routed_experts: The experts that each token was routed to: column `routed_experts`, shape (rows, layers,
            experts). The last token of a path has none yet. `True` takes the shape from the engine. SGLang does not
            report it: give (layers, experts per token) of the model's configuration. "flat" takes rows of any shape:
            (rows, layers * experts) if the engine does not report it.
        sampling_mask: The ids that `top_k`, `top_p` and `min_p` keep: column `sampling_mask`, shape (n, k), padded
            with -1. Needs a finite `top_k`.
        priority: Higher is served sooner, if the server schedules by priority.
        cache_salt: Requests share cached prompts only with requests of the same salt (None: with those without one).
    """

    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS, strict=True)] = 0
    prompt_logprobs: StrictBool = False
    routed_experts: StrictBool | Literal["flat"] | tuple[Size, Size] = False
    sampling_mask: StrictBool = False
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31, strict=True)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        refuse_unknown("optional output", data, cls.model_fields)
        return data

    @field_validator("cache_salt")
    @classmethod
    def _salt(cls, value: str | None) -> str | None:
        if value is not None and _SALT_FORBIDDEN & set(value):
            raise ValueError(
                "cache_salt must not contain '@', '/', a backslash or NUL, which some servers refuse: "
                f"{short_repr(value)}."
            )
        return value

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """(layers, experts per token), or None if the user did not give them."""
        return self.routed_experts if isinstance(self.routed_experts, tuple) else None

    @classmethod
    def of(cls, given: OptionalOutputs | Mapping[str, Any] | None) -> OptionalOutputs:
        """Check a user's value; None means no optional outputs.

        Raises:
            InvalidValueError: An unknown name or a bad value.
        """
        if isinstance(given, OptionalOutputs):
            return given
        if given is None or given == {}:
            return NO_OPTIONAL_OUTPUTS
        if not isinstance(given, Mapping):
            raise InvalidValueError(
                f"optional_outputs must be a dict, such as {{'top_logprobs': 5}}, not {short_repr(given)}."
            )
        return cls(**checked_names("optional output", given, cls.model_fields))


NO_OPTIONAL_OUTPUTS = OptionalOutputs()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional outputs that a server supports. None is unknown: the request is sent, and the server may refuse it.

    Attributes:
        top_logprobs: Largest number of top logprobs per token.
        prompt_logprobs: Whether it supports them.
        routed_experts: Whether it supports them.
        expert_shape: Whether it reports the number of layers and experts.
        sampling_mask: Whether it supports it.
        priority: Whether it schedules by priority.
        lower_first: Whether it serves a lower priority sooner.
        grammar_from_first_token: Whether a grammar constrains an answer from its first token, not only after the
            policy's reasoning. None also without grammars: then the backend refuses one with a BadRequestError.
        adapters: Whether requests and scores may name a LoRA adapter.
        options: The server option that enables an output, or raises its limit, by its name in `OptionalOutputs`; and
            that for a "grammar".
    """

    top_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prompt_logprobs: bool | None = None
    routed_experts: bool | None = None
    expert_shape: bool | None = None
    sampling_mask: bool | None = None
    priority: bool | None = None
    lower_first: bool = False
    grammar_from_first_token: bool | None = None
    adapters: bool = False
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def service_fields(self, optional_outputs: OptionalOutputs) -> dict[str, Any]:
        """Return priority and cache salt under the field names that both engines share."""
        fields: dict[str, Any] = {}
        if optional_outputs.priority is not None:
            fields["priority"] = -optional_outputs.priority if self.lower_first else optional_outputs.priority
        if optional_outputs.cache_salt is not None:
            fields["cache_salt"] = optional_outputs.cache_salt
        return fields

    def check(self, optional_outputs: OptionalOutputs, sampling: SamplingParams, *, backend: str) -> None:
        """Check that the server supports the optional outputs, and applies the grammar to the whole answer.

        Raises:
            UnsupportedByServerError: It does not; the message names the option that enables the output.
        """
        if sampling.grammar is not None and self.grammar_from_first_token is False:
            option = f", or a newer version with {self.options['grammar']}" if "grammar" in self.options else ""
            raise UnsupportedByServerError(
                f"This {backend} server would apply a grammar only after the policy's reasoning, so it was not sent: a "
                "forced tool call, structured output or another grammar would not constrain the answer. "
                f"Start it without its reasoning parser{option}.",
                backend=backend,
            )
        if optional_outputs is NO_OPTIONAL_OUTPUTS:
            return
        if problem := self._problem(optional_outputs, sampling, f"this {backend} server"):
            raise UnsupportedByServerError(problem, backend=backend)

    def check_adapter(self, adapter: Adapter | None, *, backend: str) -> None:
        """Check that requests may name a LoRA adapter.

        Raises:
            UnsupportedByServerError: They may not, and would be answered by the model alone.
        """
        if adapter is not None and not self.adapters:
            raise UnsupportedByServerError(
                f"The backend {backend!r} does not send adapters, so adapter={str(adapter)!r} would have no effect. "
                "Serve the model with the adapter merged into it, or use another backend.",
                backend=backend,
            )

    def _problem(self, optional_outputs: OptionalOutputs, sampling: SamplingParams, server: str) -> str | None:
        k, most = optional_outputs.top_logprobs, self.top_logprobs
        if most is not None and k > most:
            option = self.options.get("top_logprobs")
            advice = f"Lower it, or start the server with a higher {option}" if option else "Lower it"
            return f"top_logprobs={k} exceeds the limit of {server}, {most}. {advice}."
        for name in ("prompt_logprobs", "routed_experts", "sampling_mask", "priority"):
            requested = getattr(optional_outputs, name)
            if requested is not False and requested is not None and getattr(self, name) is False:
                option = self.options.get(name)
                advice = f"Start the server with {option}" if option else "Leave it out"
                return f"{name}={requested!r} is not supported by {server}. {advice}."
        if optional_outputs.routed_experts is True and self.expert_shape is False:
            return (
                f"routed_experts=True needs a server that reports the number of layers, and {server} does not. Give "
                "routed_experts=(layers, experts per token) of the model's configuration."
            )
        if optional_outputs.sampling_mask and sampling.temperature > 0 and sampling.top_k < 1:
            return (
                "sampling_mask=True needs a finite top_k: without one, the mask of each token could hold the whole "
                "vocabulary. Set top_k in the sampling parameters."
            )
        return None


MayBeUnreported: TypeAlias = Literal["response_id", "echoed", "prompt_tokens", "completion_tokens", "media"]
MAY_BE_UNREPORTED: frozenset[MayBeUnreported] = frozenset(get_args(MayBeUnreported))
"""Fields of `RawResponse` that some servers cannot report; see `EngineInfo.unreported`. `media`: nor `image_tokens`."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A server's properties at connect.

    Attributes:
        backend: Name of the backend that reports them; see `Backend.name`.
        model: Name of the model in requests.
        max_model_len: Maximum number of tokens of prompt and completion together; None if not reported.
        version: The server's version, or None.
        weight_version: Version of the loaded weights at connect, or None.
        vocab_size: Rows of the model's embedding; a larger id can crash a server. None if not reported.
        endpoints: Paths that generate from token ids, the one in use first.
        processed_logprobs: Whether logprobs include the temperature, as measured; None if not measured.
        truncated_logprobs: Whether logprobs are normalised over the tokens that `top_k`, `top_p` and `min_p` keep, as
            measured; None if not measured.
        capabilities: The optional outputs that the server supports.
        unreported: Fields of `RawResponse`, out of `MAY_BE_UNREPORTED`, that the server's API does not have. The core
            checks them only where they are present, and the suite reports their checks as not applicable.
        images: Whether the server takes images.
        answering_models: How answers name their model, as measured; empty if they do not, or if that was not measured.
        reports_versions: Whether every measured answer had weight versions.
        extra_fields: Names that `SamplingParams.extra` may have; None if unknown, then the server decides.
        raw_before_penalties: Whether raw logprobs are taken before penalties, `min_new_tokens` and engine parameters
            such as a `logit_bias` change the logits. False also where that is unknown.
    """

    backend: str
    model: str
    max_model_len: Count | None
    version: str | None
    weight_version: str | None = None
    processed_logprobs: bool | None = None
    vocab_size: Count | None = None
    endpoints: tuple[str, ...] = ()
    truncated_logprobs: bool | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    unreported: frozenset[MayBeUnreported] = frozenset()
    images: ImageSupport = NO_IMAGES
    raw_before_penalties: bool = False
    extra_fields: frozenset[str] | None = None
    answering_models: frozenset[str] = frozenset()
    reports_versions: bool = False

    def __post_init__(self) -> None:
        """Check every field once, so that turns need not.

        Raises:
            ProtocolViolationError: A field has a wrong type, or a size is not a positive whole number.
        """
        _check_fields(self.backend, "", self)
        _check_fields(self.backend, "capabilities.", self.capabilities)
        _check_fields(self.backend, "images.", self.images)
        for name in ("version", "weight_version"):  # a server may echo the key; ledgers and reports hold these
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, hidden(value, own=True))


def _check_fields(backend: Any, prefix: str, reported: EngineInfo | Capabilities | ImageSupport) -> None:
    """Hold the fields to their declared types.

    Raises:
        ProtocolViolationError: A field has another type, is out of its range, or no text that can be written.
    """
    for name, hint in get_type_hints(type(reported), include_extras=True).items():
        value = getattr(reported, name)
        try:
            declared = msgspec.convert(value, hint)
            msgspec.json.encode(declared, enc_hook=dict)
            problem = None if declared == value else f"Expected {type(declared).__name__}, got {type(value).__name__}"
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            problem = str(error)
        if problem is not None:
            raise ProtocolViolationError(
                f"The backend {short_repr(backend)} reports {prefix}{name}={short_repr(value)}: {problem}. Correct "
                "what its connect() returns, or check how the server was started, and any proxy in front of it.",
                backend=backend if is_text(backend) else "",
            )


NO_COLUMNS: Mapping[str, Column] = MappingProxyType({})
"""The columns of a response without optional outputs; shared by all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRequest:
    """One generation.

    Attributes:
        input_ids: The whole prompt as it travels, int32, shape (p,): collapsed, with one placeholder for each image.
        sampling: Parameters, `max_new_tokens` already clamped to the context.
        request_id: Our unique id; the engine aborts by it.
        session_id: A router keeps all requests of a session on one worker, for its prefix cache; None for any worker.
        id_text: JSON text of `input_ids`, if it was cached. The core fills it in before it calls a backend.
        optional_outputs: Outputs besides sampled tokens and their logprobs.
        delta_start: Offset of the turn's own prompt tokens in the expanded prompt. Optional outputs of the prompt cover
            only these.
        is_probe: Whether the answer only measures the server: optional outputs may be missing from it, and a damaged
            one is sent again.
        echo: Whether the engine must echo the prompt ids, which are then compared. Their count is always compared. With
            images always True.
        images: The images that its placeholders stand for; None for a prompt of text.
        measured: The server as measured at connect. The answer must name its model as the measured answers did, and
            have weight versions if they had. None where nothing was measured yet.
        adapter: The LoRA adapter to sample with; None for the model alone.
    """

    input_ids: TokenIds
    sampling: SamplingParams
    request_id: str
    session_id: str | None = None
    id_text: IdText | None = None
    optional_outputs: OptionalOutputs = NO_OPTIONAL_OUTPUTS
    delta_start: int = 0
    is_probe: bool = False
    echo: bool = True
    images: PromptImages | None = None
    measured: EngineInfo | None = None
    adapter: Adapter | None = None

    @property
    def echo_text(self) -> IdText | None:
        """Text of the ids that the server should echo, if it is known: an equal echo need not be decoded."""
        return self.id_text if self.images is None else self.images.echo_text

    @property
    def least_length(self) -> int:
        """Number of tokens of the expanded prompt, where each new image counts as one token."""
        images = self.images
        return len(self.input_ids) + (0 if images is None else sum(images.lengths) - len(images.lengths))

    @property
    def first_scored(self) -> int:
        """Offset of the first token with a prompt logprob: the delta's first, but never token 0, which has none."""
        return max(self.delta_start, 1)

    @property
    def first_routed(self) -> int:
        """Offset of the first token whose routed experts this request reports: the last token before the delta.

        The turn before sampled that token last, and the engine routes it only now, when it reads it in this prompt.
        """
        return max(self.delta_start - 1, 0)


Integers: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Floats: TypeAlias = Sequence[float | None] | npt.NDArray[np.floating[Any]]
ScoredTokens: TypeAlias = Sequence[tuple[int | str | None, float | None]]
"""(id, logprob) pairs; the logprob of a masked token is None, -9999 or the lowest float32."""
UndecodedIds: TypeAlias = bytes | msgspec.Raw
"""A list of ids as JSON text, as the server sent it."""
NOTHING = msgspec.Raw(b"null")
"""Undecoded JSON of a field that the server left out or sent as null."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RawResponse:
    """One generation as the server reported it, under our field names, unchecked. It becomes a `TokenResponse`.

    A backend copies fields and fills nothing in: a missing field stays None. Lists may be NumPy arrays.

    Attributes:
        finish: Why sampling stopped: "stop", "length", "abort", or another word of the server, which is kept and
            becomes the nearest of these.
        output_ids: Sampled ids, the stop token included.
        logprobs: One per output id, in nats.
        response_id: The id by which the answer itself names its request, as the server wrote it: the id that was sent,
            possibly after a prefix ("cmpl-<id>"). Required, unless `EngineInfo.unreported` names it: without it the
            answer of another request with the same prompt cannot be recognised.
        echoed: The prompt ids that the server read, or their undecoded JSON. Required, unless `TokenRequest.echo` is
            False or `EngineInfo.unreported` names it.
        echoed_from: Offset of the prompt from which `echoed` holds it; 0 for the whole. A server behind a router that
            drops the echo may repeat the turn's own tokens only, from `TokenRequest.delta_start` or earlier.
        prompt_tokens: The server's count of prompt tokens. Required, unless `unreported`.
        completion_tokens: The server's count of sampled tokens. Required, unless `unreported`.
        stop: The stop token id or string that the server names. Where it names none, the core takes the requested stop
            string that the text completes first, else the last id.
        logprob_ids: The ids that the logprobs belong to; None if the server lists logprobs in the order of the output.
        cached_tokens: Prompt tokens from the prefix cache.
        versions: Weight-version spans (start, stop, version) in offsets of the output; empty if not reported.
        message: The server's message about an abort.
        top_logprobs: For each output position a list of (id, logprob) of the most likely tokens, in any order, with or
            without the sampled token; or a callable that decodes them.
        prompt_logprobs: The prompt's own tokens from `TokenRequest.first_scored` on.
        routed_experts: An integer array of shape (rows, layers, experts), or base64 of a `.npy` or of bare
            little-endian int32.
        sampling_mask: For each output token the ids that it was sampled from.
        recomputed: The server gave up the request's key-values and computed them again from its tokens.
        media: The server's own (offset, length) of each image's placeholders in the prompt that it read, in order; None
            if it does not report them. For a prompt with images `media` or `image_tokens` is required, unless
            `unreported` names `media`.
        image_tokens: The server's count of placeholder tokens; None if not reported.
        latency_s: Seconds from sending to the last byte, retries excluded.
        request_id: Id that the backend sent for the answered try: the request's own, or that with "-" and a suffix
            for a retry; the request's own when None.
        unordered: The answer was streamed, and nothing in its events shows their order.
        served_by: What the answer says of the server that made it, such as names of model and version; None if nothing.
            Our HTTP backends query the server again when it changes; of other backends it is recorded only.
        model: How the answer names its model, or the adapter; None if it does not. Another name than at connect, or
            than the adapter's, is refused.
    """

    finish: str | None
    output_ids: Integers | None
    logprobs: Floats | None
    response_id: str | None = None
    echoed: Integers | UndecodedIds | None = None
    echoed_from: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    stop: int | str | None = None
    logprob_ids: Sequence[int | str] | npt.NDArray[np.integer[Any]] | None = None
    cached_tokens: int | None = None
    versions: Sequence[tuple[int, int, str | None]] = ()
    message: str | None = None
    top_logprobs: Sequence[ScoredTokens] | Callable[[], Sequence[ScoredTokens]] | None = None
    prompt_logprobs: ScoredTokens | None = None
    routed_experts: str | npt.NDArray[np.integer[Any]] | None = None
    sampling_mask: Sequence[Integers] | None = None
    recomputed: bool = False
    media: Sequence[tuple[int, int]] | None = None
    image_tokens: int | None = None
    latency_s: float = 0.0
    request_id: str | None = None
    unordered: bool = False
    served_by: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RawScores:
    """Scores of a sequence as the server reported them, unchecked.

    Attributes:
        logprobs: One per token; None or NaN for the first.
        token_ids: The ids that the server scored, the first may be None; None if the server does not report ids.
        request_id: Id that the backend sent; None if it sent none.
        response_id: The id by which the answer names its request. Required with `request_id`, unless
            `EngineInfo.unreported` names it.
        of_ids: What `IdScorer.score_ids` adds, for each token but the first: rows of (id, logprob) in the order of the
            given ids, or base64 of the `.npy` of a floating array of shape (n - 1, k).
    """

    logprobs: Floats | None
    token_ids: Sequence[int | None] | npt.NDArray[np.integer[Any]] | None = None
    request_id: str | None = None
    response_id: str | None = None
    of_ids: str | Sequence[ScoredTokens] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenResponse:
    """One validated answer from one response (law 4), or from several that `generate_resuming` joined.

    Only the core makes these, from a `RawResponse`: see `tito_core.backend.generate`.

    Attributes:
        output_ids: int32, shape (n,), the stop token included.
        logprobs: float32, shape (n,), as the engine reported them.
        finish: Why sampling stopped. After `ABORT` the output is partial or empty.
        stop: The stop token id or string that ended it, or None.
        prompt_length: Prompt tokens as the engine counted them, placeholders included.
        cached_tokens: Prompt tokens served from the prefix cache, or None if not reported.
        latency_s: Seconds from sending to the last byte, retries excluded.
        request_id: Id that was sent for the answered try.
        versions: Weight-version spans that tile the output; one span of None if not reported.
        columns: The optional outputs by the name of their column, in offsets of `input_ids`.
        message: The engine's message about an abort, or None.
        responses: The spans of the responses that were joined; empty for a single response.
        media: (offset, length) of the placeholders of each new image, in order, in the expanded prompt.
        finish_word: The server's own word for why sampling stopped, where it is none of `Finish`; else None.
        unordered: See `RawResponse.unordered`.
        model: See `RawResponse.model`.
        echoed_from: See `EngineRecord.echoed_from`.
    """

    output_ids: TokenIds
    logprobs: Logprobs
    finish: Finish
    stop: int | str | None
    prompt_length: int
    cached_tokens: int | None
    latency_s: float
    request_id: str
    versions: tuple[VersionSpan, ...]
    columns: Mapping[str, Column] = field(default_factory=lambda: NO_COLUMNS)
    message: str | None = None
    responses: tuple[ResponseSpan, ...] = ()
    media: tuple[tuple[int, int], ...] = ()
    finish_word: str | None = None
    unordered: bool = False
    model: str | None = None
    echoed_from: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """The new tokens of a streamed answer, not yet validated: for display, not for the ledger.

    Attributes:
        output_ids: Sampled ids, shape (k,).
    """

    output_ids: npt.NDArray[np.int64]


OnChunk = Callable[[TokenChunk], None]
"""Called with each chunk in order, in the event loop of the request."""
