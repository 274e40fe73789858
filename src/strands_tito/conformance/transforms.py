"""What the reported logprobs are of: those at a temperature, under a truncation or penalties follow from the raw ones.

A single token after a fixed prompt is requested at temperature 1, and then with other parameters. The differences of
two likely tokens' logprobs scale by 1 / T, a truncation leaves the tokens that it should, and penalties move what they
should. Only differences are compared, so no normaliser is needed.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from strands_tito.conformance import truncation
from strands_tito.conformance.draws import Draw, draw_of
from strands_tito.conformance.laws import Tally, Where
from strands_tito.conformance.sampler import (
    LEAST_TOP,
    PENALISED,
    QUESTIONS,
    RESTRICTED,
    Question,
    drawn_questions,
    top_of,
)
from strands_tito.conformance.target import ConnectedServer
from tito_core.backend import OptionalOutputs
from tito_core.backend.calls import generate
from tito_core.backend.errors import BadRequestError
from tito_core.backend.protocol import TokenRequest
from tito_core.ledger.columns import TokenIds

PENALISED_TOKENS = 12
"""Tokens of the answer under penalties."""


async def check(server: ConnectedServer, tally: Tally) -> bool | None:
    """Compare reported logprobs with those at temperature 1.

    Returns:
        Whether reported logprobs include penalties; None if unknown.
    """
    info = server.policy.info
    if top_of(server) < LEAST_TOP or server.needs_top_k or info.processed_logprobs is None:
        tally.skip("semantics", "Top logprobs, or what they are of, are not known.")
        return None
    random = np.random.default_rng(server.target.seed + 1)
    for text in QUESTIONS[:2]:
        messages: list[Any] = [{"role": "user", "content": [{"text": text}]}]
        prompt = server.policy.template.first_prompt(messages, None, None).ids
        plain = await _ask(server, prompt, {"temperature": 1.0})
        for question in (*RESTRICTED, *drawn_questions(random, 2)):
            try:
                found = await _ask(server, prompt, question.sampling)
            except BadRequestError as error:
                tally.skip("semantics", f"{question.name}: {str(error).partition(chr(10))[0]}")
                continue
            _compare(server, tally, question, plain, found)
    outcomes = [await _penalised(server, tally, question) for question in PENALISED]
    return next((each for each in outcomes if each is not None), None)


async def _ask(server: ConnectedServer, prompt: TokenIds, sampling: Mapping[str, Any], tokens: int = 1) -> Draw:
    outputs = OptionalOutputs(top_logprobs=top_of(server))
    params = server.sampling(max_new_tokens=tokens, **sampling)
    return draw_of(
        await generate(server.policy.backend, TokenRequest(prompt, params, uuid.uuid4().hex, optional_outputs=outputs))
    )


def _row(draw: Draw, at: int = 0) -> dict[int, float]:
    """Return the likeliest tokens of a place, likeliest first."""
    pairs = zip(draw.top_ids[at].tolist(), draw.top_logprobs[at].tolist(), strict=True)
    return {token: value for token, value in pairs if value > -math.inf}


def _compare(server: ConnectedServer, tally: Tally, question: Question, plain: Draw, found: Draw) -> None:
    info = server.policy.info
    raw, reported = _row(plain), _row(found)
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
        where = Where(position=0, token=at)
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


async def _penalised(server: ConnectedServer, tally: Tally, question: Question) -> bool | None:
    """Compare an answer under penalties with what the same tokens have without them."""
    messages: list[Any] = [{"role": "user", "content": [{"text": QUESTIONS[0]}]}]
    prompt = server.policy.template.first_prompt(messages, None, None).ids
    try:
        draw = await _ask(server, prompt, question.sampling, PENALISED_TOKENS)
    except BadRequestError as error:
        tally.skip("semantics", f"{question.name}: {str(error).partition(chr(10))[0]}")
        return None
    output = draw.ids.tolist()
    with_, without = [0.0], [0.0]
    for at in range(1, len(output)):
        raw = _row(await _ask(server, np.concatenate([prompt, draw.ids[:at]]).astype(np.int32), {"temperature": 1.0}))
        offsets, reported = question.offsets(output[:at]), _row(draw, at)
        shared = [token for token in reported if token in raw]
        if not any(token in offsets for token in shared) or all(token in offsets for token in shared):
            continue
        plain = [reported[token] - raw[token] for token in shared]
        moved = [value - offsets.get(token, 0.0) for token, value in zip(shared, plain, strict=True)]
        with_.append(max(moved) - min(moved))
        without.append(max(plain) - min(plain))
    if len(with_) == 1:
        tally.skip("semantics", "No likely token was repeated, so penalties show in no logprob.")
        return None
    near = 2 * server.tolerance_nats
    penalised = max(with_) < max(without)
    wrong = min(max(with_), math.inf if server.policy.info.processed_logprobs else max(without))
    problem = (
        f"Under {question.name}, the logprobs of likely tokens are {wrong:.3g} nats off "
        f"those without penalties, moved by what the penalties say."
    )
    tally.require("semantics", wrong <= near, problem, len(with_) - 1, Where(sampling=question.sampling))
    return penalised
