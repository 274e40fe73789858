"""What the reported logprobs are of: those at a temperature or under a truncation follow from the raw ones.

A single token after a fixed prompt is requested at temperature 1, and then with other parameters, whole and streamed.
The differences of two likely tokens' logprobs scale by 1 / T, and a truncation leaves the tokens that it should. Only
differences are compared, so no normaliser is needed.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from tito_conformance import sampler as truncation
from tito_conformance.checks import Tally, Where
from tito_conformance.sampler import (
    LEAST_TOP,
    QUESTIONS,
    RESTRICTED,
    Draw,
    Question,
    draw_of,
    drawn_questions,
    prompt_of,
    top_of,
)
from tito_conformance.target import ConnectedServer, can_stream
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import BadRequestError
from tito_core.backend.generate import generate
from tito_core.backend.protocol import TokenRequest
from tito_core.ledger.columns import TokenIds


async def check(server: ConnectedServer, tally: Tally) -> None:
    """Compare reported logprobs with those at temperature 1."""
    info = server.policy.info
    if top_of(server) < LEAST_TOP or server.needs_top_k or info.processed_logprobs is None:
        tally.skip("semantics", "Top logprobs, or what they are of, are not known.")
        return
    random = np.random.default_rng(server.target.seed + 1)
    for streamed, text in zip((False, can_stream(server.backend)), QUESTIONS, strict=False):
        prompt = prompt_of(server, text)
        plain = await ask(server, prompt, {"temperature": 1.0})
        for question in (*RESTRICTED, *drawn_questions(random, 2)):
            try:
                found = await ask(server, prompt, question.sampling, streamed=streamed)
            except BadRequestError as error:
                tally.skip("semantics", f"{question.name}: {str(error).partition(chr(10))[0]}")
                continue
            _compare(server, tally, question, plain, found)


async def ask(
    server: ConnectedServer, prompt: TokenIds, sampling: Mapping[str, Any], tokens: int = 1, *, streamed: bool = False
) -> Draw:
    """Return one answer with the likeliest tokens of each place."""
    outputs = OptionalOutputs(top_logprobs=top_of(server))
    params = server.sampling(max_new_tokens=tokens, **sampling)
    request = TokenRequest(prompt, params, uuid.uuid4().hex, optional_outputs=outputs)
    response = await generate(server.policy.backend, request, (lambda _: None) if streamed else None)
    return draw_of(response, streamed=streamed)


def row(draw: Draw, at: int = 0) -> dict[int, float]:
    """Return the likeliest tokens of a place, likeliest first."""
    pairs = zip(draw.top_ids[at].tolist(), draw.top_logprobs[at].tolist(), strict=True)
    return {token: value for token, value in pairs if value > -math.inf}


def _compare(server: ConnectedServer, tally: Tally, question: Question, plain: Draw, found: Draw) -> None:
    info = server.policy.info
    raw, reported = row(plain), row(found)
    scale = 1 / question.temperature if info.processed_logprobs else 1.0
    shared = [token for token in reported if token in raw]
    near = 2 * server.tolerance_nats
    if shared:
        differences = [reported[token] - raw[token] * scale for token in shared]
        apart = max(differences) - min(differences)
        at = shared[int(np.argmax(np.abs(np.array(differences) - np.median(differences))))]
        problem = (
            f"At {question.name}, the logprobs of {len(shared)} likely tokens are not those at temperature 1"
            f"{f' divided by {question.temperature:g}' if info.processed_logprobs else ''}: token {at} is "
            f"{apart:.3g} nats off, more than {near * max(scale, 1):.3g}."
        )
        where = Where(None, 0, at, question.sampling, found.streamed)
        tally.require("semantics", apart <= near * max(scale, 1), problem, len(shared), where)
    if question.cuts and info.truncated_logprobs:
        vocabulary = info.vocab_size or len(server.policy.tokenizer)
        weights = truncation.tempered(plain.top_logprobs[:1], question.temperature, vocabulary)
        may, must = (
            {token for token, kept in zip(plain.top_ids[0].tolist(), table[0].tolist(), strict=True) if kept}
            for table in truncation.left(question.sampling, weights, near)
        )
        wrong = [token for token in shared if token not in may]
        lost = [token for token in must if token not in reported] if len(must) < len(raw) else []
        problem = f"At {question.name}, the reported logprobs {{}} tokens {{}}, which {question.name} {{}}."
        tally.require("semantics", not wrong, problem.format("hold", wrong[:4], "leaves out"))
        tally.require("semantics", not lost, problem.format("lack", lost[:4], "keeps"))
