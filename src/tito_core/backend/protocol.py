"""The backend protocol: requests to an engine, and its responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.id_text import IdText
from tito_core.backend.images import PromptImages
from tito_core.backend.optional_outputs import NO_OPTIONAL_OUTPUTS, OptionalOutputs
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import Column, Logprobs, TokenIds
from tito_core.ledger.turn import Finish, ResponseSpan, VersionSpan

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
        outputs_may_be_missing: Whether optional outputs may be missing from the answer; used to measure what a server
            supports.
        echo: Whether the engine must echo the prompt ids, which are then compared. Their count is always compared. With
            images always True.
        images: The images that its placeholders stand for; None for a prompt of text.
        measured: The server as measured at connect. The answer must name its model as the measured answers did, and
            have weight versions if they had. None where nothing was measured yet.
    """

    input_ids: TokenIds
    sampling: SamplingParams
    request_id: str
    session_id: str | None = None
    id_text: IdText | None = None
    optional_outputs: OptionalOutputs = NO_OPTIONAL_OUTPUTS
    delta_start: int = 0
    outputs_may_be_missing: bool = False
    echo: bool = True
    images: PromptImages | None = None
    measured: EngineInfo | None = None

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
        prompt_tokens: The server's count of prompt tokens. Required, unless `unreported`.
        completion_tokens: The server's count of sampled tokens. Required, unless `unreported`.
        stop: The stop token id or string that the server names.
        logprob_ids: The ids that the logprobs belong to; None if the server lists logprobs in the order of the output.
        cached_tokens: Prompt tokens from the prefix cache.
        versions: Weight-version spans (start, stop, version) in offsets of the output; empty if not reported.
        message: The server's message about an abort.
        top_logprobs: The most likely tokens at each output position, in any order, with or without the sampled token;
            or a callable that decodes them.
        prompt_logprobs: The prompt's own tokens from `TokenRequest.first_scored` on.
        routed_experts: An integer array of shape (rows, layers, experts), or base64 of a `.npy` or of bare
            little-endian int32.
        sampling_mask: For each output token the ids that it was sampled from.
        media: The server's own (offset, length) of each image's placeholders in the prompt that it read, in order; None
            if it does not report them. For a prompt with images `media` or `image_tokens` is required, unless
            `unreported` names `media`.
        image_tokens: The server's count of placeholder tokens; None if not reported.
        latency_s: Seconds from sending to the last byte, retries excluded.
        request_id: Id that the backend sent for the answered try: the request's own, or that with "-" and a suffix
            for a retry; the request's own when None.
        unordered: The answer was streamed, and nothing in its events shows their order.
        served_by: What the answer says of the server that made it, such as names of model and version; None if nothing.
            A new value makes the core query the server again.
        model: How the answer names its model; None if it does not. Another name than at connect is refused.
    """

    finish: str | None
    output_ids: Integers | None
    logprobs: Floats | None
    response_id: str | None = None
    echoed: Integers | UndecodedIds | None = None
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
    """

    logprobs: Floats | None
    token_ids: Sequence[int | None] | npt.NDArray[np.integer[Any]] | None = None
    request_id: str | None = None
    response_id: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenResponse:
    """One validated answer from one response (law 4), or from several that `generate_resuming` joined.

    Only the core makes these, from a `RawResponse`: see `tito_core.backend.calls`.

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


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """The new tokens of a streamed answer, not yet validated: for display, not for the ledger.

    Attributes:
        output_ids: Sampled ids, shape (k,).
    """

    output_ids: npt.NDArray[np.int64]


OnChunk = Callable[[TokenChunk], None]
"""Called with each chunk in order, in the event loop of the request."""


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


Running = Literal["keep", "abort"]
"""Whether a pause keeps running generations, which continue afterwards, or aborts them."""


@runtime_checkable
class EngineAdmin(Protocol):
    """Optional methods of a backend whose server can change its weights.

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
