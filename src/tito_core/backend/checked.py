"""The one place where the core uses a backend: it checks what is sent before, and what comes back after.

No backend vouches for itself (law 4): everything outside `tito_core.backend` that generates or scores calls these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tito_core.backend.errors import ProtocolViolationError
from tito_core.backend.protocol import Backend, OnChunk, TokenChunk, TokenRequest, TokenResponse
from tito_core.backend.raw_values import integers
from tito_core.backend.request_checks import check_input_ids, clamp_new_tokens, sendable
from tito_core.backend.score_validation import validated_ids, validated_scores
from tito_core.backend.typed_values import shown
from tito_core.backend.validation import validated
from tito_core.ledger.columns import Logprobs, TokenIds


async def generate(backend: Backend, request: TokenRequest, on_chunk: OnChunk | None = None) -> TokenResponse:
    """Sample one completion.

    Args:
        backend: Any backend.
        request: What is asked. What does not fit the context is refused or clamped.
        on_chunk: See `Backend.generate`.

    Raises:
        BackendError: The request cannot be sent, or failed.
        ProtocolViolationError: The answer breaks law 2, 4 or 10.
    """
    info = await backend.connect()
    sent = sendable(request, info, backend=backend.name)
    if on_chunk is None:
        return validated(await backend.generate(sent), sent, info)

    def show(chunk: TokenChunk) -> None:
        on_chunk(_readable(chunk, info.backend, request.request_id))

    return validated(await backend.generate(sent, show), sent, info)


async def score(backend: Backend, token_ids: Sequence[int] | TokenIds) -> Logprobs:
    """Score a sequence teacher-forced: log p(token i | tokens before i), raw, at temperature 1.

    Returns:
        float32, shape (n,); the first is NaN, since nothing comes before it.

    Raises:
        BackendError: The sequence cannot be sent, or scoring failed.
        ProtocolViolationError: The scores break law 4.
    """
    info = await backend.connect()
    ids = check_input_ids(token_ids, info.vocab_size, backend=backend.name)
    clamp_new_tokens(1, len(ids), info.max_model_len, backend=backend.name)  # vLLM cannot score without sampling one
    return validated_scores(await backend.score(ids), ids, info)


async def tokenize(backend: Backend, text: str) -> TokenIds | None:
    """Encode text with the server's own tokenizer (law 15).

    Returns:
        int32, shape (n,); None where the server cannot.

    Raises:
        BackendError: The server could not be asked.
        ProtocolViolationError: What came are no token ids.
    """
    return validated_ids(await backend.tokenize(text), await backend.connect())


def _readable(chunk: object, backend: str, request_id: str) -> TokenChunk:
    ids = integers(chunk.output_ids) if isinstance(chunk, TokenChunk) else None
    if ids is None or not all(0 <= token < 2**31 for token in ids):
        raise ProtocolViolationError(
            f"Law 4: on_chunk must be given a TokenChunk of token ids, not {shown(chunk)}.",
            backend=backend,
            request_id=request_id,
        )
    return TokenChunk(np.array(ids, np.int64))
