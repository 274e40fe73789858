"""The seam: what the core asks of an engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tito_core.backend.id_text import IdText
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.wanted import NOTHING_WANTED, Capabilities, Wanted
from tito_core.ledger.columns import Column, Logprobs, TokenIds
from tito_core.ledger.turn import Finish, ResponseSpan, VersionSpan

NO_COLUMNS: Mapping[str, Column] = MappingProxyType({})
"""What comes beside when nothing is wanted: one for all turns."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a server said of itself at connect.

    Attributes:
        model: Name under which the server takes requests.
        max_model_len: Tokens that fit, prompt and completion together; None when it does not say.
        version: The server's version, or None.
        weight_version: Version of the loaded weights at connect, or None.
        vocab_size: Rows of the model's embedding, past which an id can kill a server; None when it does not say.
        endpoints: Paths that generate from token ids, the one in use first.
        processed_logprobs: Whether logprobs include the temperature, as measured; None when not measured.
        truncated_logprobs: Whether they are over what `top_k`, `top_p` and `min_p` left, as measured; None likewise.
    """

    backend: str
    model: str
    max_model_len: int | None
    version: str | None
    weight_version: str | None = None
    processed_logprobs: bool | None = None
    vocab_size: int | None = None
    endpoints: tuple[str, ...] = ()
    truncated_logprobs: bool | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRequest:
    """One generation.

    Attributes:
        input_ids: The whole prompt, int32, shape (p,).
        sampling: Parameters, `max_new_tokens` already clamped to the context.
        request_id: Ours, unique; the engine aborts by it.
        session_id: What a router keeps on one worker, so that its prefix cache serves every turn; None for no wish.
        text: The prompt as it travels, where somebody kept it; written anew when None.
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
    wanted: Wanted = NOTHING_WANTED
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


@dataclass(frozen=True, slots=True, eq=False)
class TokenResponse:
    """One answer, all of it from one response (law 4) unless it was put together by `generate_whole`.

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

    A backend class is built with `(base_url, *, model=None, api_key=None, timeout_s=..., max_attempts=...)`.
    """

    @property
    def name(self) -> str:
        """Name of the engine, as errors and ledgers give it."""

    async def connect(self) -> EngineInfo:
        """Ask the server what it is. Later calls give the first answer."""

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> TokenResponse:
        """Sample a completion of `request.input_ids`.

        Args:
            request: What is asked.
            on_chunk: Makes the engine stream, and gets what comes; the response is the same. Once it was called, no
                other try is made.

        Returns:
            The whole completion, or what there was of it when the engine was told to abort it: `finish` tells.

        Raises:
            BackendError: One of its subclasses says which way it failed; nothing partial is given.
        """

    async def score(self, token_ids: Sequence[int]) -> Logprobs:
        """Score a sequence teacher-forced: log p(token i | tokens before i), raw, at temperature 1.

        Returns:
            float32, shape (len(token_ids),); the first is NaN, since nothing comes before it.
        """

    async def tokenize(self, text: str) -> TokenIds | None:
        """Encode text with the server's own tokenizer, without a BOS or EOS of its own (law 15).

        Returns:
            int32, shape (n,); None where the server cannot, or where nobody may ask it.
        """

    async def abort(self, request_id: str) -> None:
        """Stop a generation on the engine. Unknown ids are no error."""

    async def aclose(self) -> None:
        """Close this event loop's connections."""
