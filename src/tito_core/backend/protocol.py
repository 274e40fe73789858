"""The seam: what the core asks of an engine, and what it gets back."""

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
from tito_core.backend.optional_outputs import NO_OPTIONAL_OUTPUTS, OptionalOutputs
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import Column, Logprobs, TokenIds
from tito_core.ledger.turn import Finish, ResponseSpan, VersionSpan

NO_COLUMNS: Mapping[str, Column] = MappingProxyType({})
"""What comes beside when nothing is wanted: one for all turns."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRequest:
    """One generation.

    Attributes:
        input_ids: The whole prompt, int32, shape (p,).
        sampling: Parameters, `max_new_tokens` already clamped to the context.
        request_id: Ours, unique; the engine aborts by it.
        session_id: What a router keeps on one worker, so that its prefix cache serves every turn; None for no wish.
        text: The prompt as JSON text, where somebody kept it. A backend may send it; the core has it written by then.
        wanted: What is asked for beside sampled tokens and their logprobs.
        delta_start: Offset of the turn's own prompt tokens: what is wanted of the prompt is wanted of these.
        lenient: Whether what is wanted may be missing from the answer, since it is being found out what a server gives.
        echo: Whether the engine is asked to echo the prompt's ids, which are then compared; their number always is.
    """

    input_ids: TokenIds
    sampling: SamplingParams
    request_id: str
    session_id: str | None = None
    text: IdText | None = None
    optional_outputs: OptionalOutputs = NO_OPTIONAL_OUTPUTS
    delta_start: int = 0
    lenient: bool = False
    echo: bool = True

    @property
    def first_scored(self) -> int:
        """Offset of the first token that `prompt_logprobs` are of: the delta's, but a prompt's very first has none."""
        return max(self.delta_start, 1)

    @property
    def first_routed(self) -> int:
        """Offset of the first token that `routed_experts` are of: the last one sampled before was routed only now."""
        return max(self.delta_start - 1, 0)


Integers: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Floats: TypeAlias = Sequence[float | None] | npt.NDArray[np.floating[Any]]
Scored: TypeAlias = Sequence[tuple[int | str | None, float | None]]
"""(id, logprob) pairs; a masked token has None, -9999 or float32's lowest."""
UndecodedIds: TypeAlias = bytes | msgspec.Raw
"""A list of ids as the JSON text that a server sent."""
NOTHING = msgspec.Raw(b"null")
"""What undecoded JSON holds where a server left a field out, or sent null."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RawResponse:
    """What a server said of one generation, under our names and unchecked. The core makes a `TokenResponse` of it.

    A backend copies what came and fills nothing in: what is missing stays None. Lists may be NumPy arrays.

    Attributes:
        finish: Why sampling stopped: "stop", "length" or "abort".
        output_ids: Sampled ids, the stop token included.
        logprobs: One for each of them, in nats.
        echoed: The prompt ids that the server says it read, or their undecoded JSON. Required, unless the request does
            not ask for it (`TokenRequest.echo`) or `EngineInfo.unreported` names it.
        prompt_tokens: Its count of them. Required, unless `unreported`.
        completion_tokens: Its count of sampled tokens. Required, unless `unreported`.
        stop: The stop token id or string that it names.
        logprob_ids: The ids that it says the logprobs belong to; None where it lists them in the order of the output.
        cached_tokens: Prompt tokens from the prefix cache.
        versions: Weight-version spans (start, stop, version) in offsets of the output; empty where it does not say.
        message: Its sentence on an abort.
        top_logprobs: For each output token the likeliest ones in any order; the sampled one may be among them. A
            callable decodes them where they are wanted.
        prompt_logprobs: The prompt's own tokens from `TokenRequest.first_scored` on.
        routed_experts: An integer array of shape (rows, layers, experts), or base64 of a `.npy` or of bare
            little-endian int32.
        sampling_mask: For each output token the ids that it was chosen from.
        latency_s: Seconds from sending to the last byte, retries excluded.
        request_id: Id under which the server ran it; the request's own when None.
    """

    finish: str | None
    output_ids: Integers | None
    logprobs: Floats | None
    echoed: Integers | UndecodedIds | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    stop: int | str | None = None
    logprob_ids: Sequence[int | str] | npt.NDArray[np.integer[Any]] | None = None
    cached_tokens: int | None = None
    versions: Sequence[tuple[int, int, str | None]] = ()
    message: str | None = None
    top_logprobs: Sequence[Scored] | Callable[[], Sequence[Scored]] | None = None
    prompt_logprobs: Scored | None = None
    routed_experts: str | npt.NDArray[np.integer[Any]] | None = None
    sampling_mask: Sequence[Integers] | None = None
    latency_s: float = 0.0
    request_id: str | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RawScores:
    """What a server said of a sequence that it scored, unchecked.

    Attributes:
        logprobs: One for each token; of the first, before which nothing comes, None or NaN.
        token_ids: The ids that it says it scored, the first of which it may leave out as None; None where it names
            none.
        request_id: Id under which the server ran it.
    """

    logprobs: Floats | None
    token_ids: Sequence[int | None] | npt.NDArray[np.integer[Any]] | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenResponse:
    """One checked answer, all of it from one response (law 4) unless it was put together by `generate_whole`.

    Only the core makes these, of what a backend reports: see `tito_core.backend.checked`.

    Attributes:
        output_ids: int32, shape (n,), the stop token included.
        logprobs: float32, shape (n,), as the engine reported them.
        finish: Why sampling stopped. With `ABORT` the output is what there was when the engine was told to stop, or
            nothing.
        stop: The stop token id or string that ended it, or None.
        prompt_length: Prompt tokens as the engine counted them.
        cached_tokens: Prompt tokens served from the prefix cache, or None when it does not say.
        latency_s: Seconds from sending to the last byte, retries excluded.
        request_id: Id under which the engine ran the answered attempt.
        versions: Weight-version spans that tile the output; one span of None when the engine does not say.
        columns: What was wanted beside, by the name of its column, in offsets of `input_ids`.
        message: The engine's sentence on an abort, or None.
        responses: Of an answer that came in several responses, which tokens came in which; else empty.
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


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """What is new of an answer that streams, as the engine says it and not yet checked: it is to be shown, not kept.

    Attributes:
        output_ids: Sampled ids, shape (k,).
    """

    output_ids: npt.NDArray[np.int64]


OnChunk = Callable[[TokenChunk], None]
"""Is called with each chunk in order, in the event loop of the request."""


@runtime_checkable
class Backend(Protocol):
    """One engine, token ids in and token ids out. Stateless between calls; safe for many concurrent ones.

    A backend class is built with `(base_url, *, model=None, api_key=None, timeout_s=..., max_attempts=...)`. The core
    checks requests before it hands them over, and answers before it keeps them: a backend need do neither.
    """

    @property
    def name(self) -> str:
        """Name of the engine, as errors and ledgers give it."""

    async def connect(self) -> EngineInfo:
        """Ask the server what it is. Later calls give the first answer."""

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample a completion of `request.input_ids`.

        A generation that is lost or cancelled is aborted on the engine.

        Args:
            request: What is asked. Ids, sampling parameters and the room in the context are checked.
            on_chunk: Makes the engine stream, and gets what comes; the response is the same. Once it was called, no
                other try is made. A backend without the parameter never streams.

        Returns:
            What the server said of the whole completion, or of what there was when it aborted it.

        Raises:
            BackendError: One of its subclasses says which way it failed; nothing partial is given.
        """

    async def score(self, token_ids: TokenIds) -> RawScores:
        """Score a sequence teacher-forced: log p(token i | tokens before i), raw, at temperature 1.

        Args:
            token_ids: int32, shape (n,), checked.

        Raises:
            UnsupportedByServerError: The server cannot.
        """

    async def tokenize(self, text: str) -> Integers | None:
        """Encode text with the server's own tokenizer, without a BOS or EOS of its own (law 15).

        Returns:
            The ids; None where the server cannot, or where nobody may ask it.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a generation on the engine. Unknown ids are no error."""

    async def aclose(self) -> None:
        """Close this event loop's connections."""


Running = Literal["keep", "abort"]
"""What becomes of the generations that run when a server is paused: they go on afterwards, or end."""


@runtime_checkable
class EngineAdmin(Protocol):
    """A backend whose server lets its weights be changed. Ours do; a third one need not.

    A training loop calls it, and a rollout never.
    """

    @property
    def name(self) -> str:
        """See `Backend.name`."""

    async def pause(self, running: Running = "keep") -> None:
        """Hold every generation back until `resume`; new ones wait. What was cached of the weights so far is let go."""

    async def resume(self) -> None:
        """Let generations go on."""

    async def load_weights(self, path: str, version: str, *, running: Running = "keep") -> None:
        """Pause, load the weights in a folder that the server can read, name their version, and resume.

        A generation that went on over the change reports which tokens came from which version (law 10).

        Raises:
            WeightsNotLoadedError: The server could not; it is left paused, so that nothing samples from half of them.
        """

    async def weight_version(self) -> str | None:
        """Give the version that the server names now, or None when it does not say."""
