"""How large the answer to a generation may be: a bound that follows from what was asked for.

An id, its logprob and its share of a stream's event take about 50 to 300 bytes on both engines. The bounds are several
times what the most talkative of them writes, so that no honest answer meets them, and no server fills our memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tito_core.backend.protocol import TokenRequest
from tito_core.backend.wanted import NOTHING_WANTED, Wanted

BASE_BYTES = 1 << 20
"""What an answer says apart from its tokens."""
TOKEN_BYTES = 2048
"""For each token of prompt and answer: id, logprob, text, and experts that a server adds unasked."""
SCORED_BYTES = 512
"""For each optional logprob: the top ones, and those of the prompt."""
MASK_BYTES = 16
"""For each id of a sampling mask."""
EXPERT_BYTES = 8
"""For each expert of a token and layer: as base64 of four bytes, or as a JSON number."""
UNKNOWN_EXPERTS = 2048
"""Experts of a token over all layers, where only the server knows them: 94 layers of 8 are 752."""


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """Bounds on one answer.

    Attributes:
        body: Most bytes of the body, or of one event of a stream.
        stream: Most bytes of a whole stream.
    """

    body: int
    stream: int


def answer_size(request: TokenRequest, *, repeats: int = 1) -> AnswerSize:
    """Return the bounds on the answer to a generation.

    Args:
        request: What is asked; its `max_new_tokens` fits the context.
        repeats: How many events of its stream repeat all of the answer so far.
    """
    sampling = request.sampling
    return size_of(
        len(request.input_ids), sampling.max_new_tokens, request.wanted, top_k=sampling.top_k, repeats=repeats
    )


def size_of(
    prompt: int,
    sampled: int,
    wanted: Wanted = NOTHING_WANTED,
    *,
    top_k: int = 0,
    repeats: int = 1,
    scores: bool = False,
) -> AnswerSize:
    """Return the bounds for so many tokens of prompt and answer.

    Args:
        prompt: Tokens of the prompt.
        sampled: Most tokens of the answer.
        wanted: What is wanted beside.
        top_k: The sampling parameter, as wide as a sampling mask gets.
        repeats: See `answer_size`.
        scores: Whether the prompt's own logprobs are asked for, whatever is wanted.
    """
    tokens = prompt + sampled
    body = BASE_BYTES + tokens * TOKEN_BYTES
    body += wanted.top_logprobs * sampled * SCORED_BYTES
    body += max(top_k, 0) * sampled * MASK_BYTES
    if scores or wanted.prompt_logprobs:
        body += prompt * SCORED_BYTES
    if wanted.routed_experts:
        layers, experts = wanted.expert_shape or (1, UNKNOWN_EXPERTS)
        body += tokens * layers * experts * EXPERT_BYTES
    return AnswerSize(body, body * (1 + repeats))
