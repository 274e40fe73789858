"""Checks with fixed prompts: repeated and concurrent requests, seeds, sampling parameters, and logprob semantics."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Any

import numpy as np

from strands_tito.conformance import routing
from strands_tito.conformance.laws import BrokenLawError, Tally, Where
from strands_tito.conformance.request_check import compare_sampling
from strands_tito.conformance.target import ConnectedServer, can_stream
from tito_core.backend import OptionalOutputs
from tito_core.backend.calls import generate, score
from tito_core.backend.errors import BadRequestError
from tito_core.backend.protocol import TokenRequest, TokenResponse
from tito_core.backend.semantics import semantics_of
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Finish

MAX_TOKENS = 24
LEAST_TOKENS = 4
"""`min_new_tokens` of an answer whose first token would end it."""
MAX_TOP = 4
"""Largest `top_logprobs` that is requested."""
NEAR_TIE_NATS = 0.02
"""Two tokens this close are a near-tie: either may be sampled. Twice the tolerance counts if it is larger."""
PROMPTS = ("Count to ten.", "Name a colour.", "Write a line about rain.", "What is 17 * 3?")
ABSENT = "\N{SNOWMAN} \N{SNOWMAN}"
"""A second stop string, which no answer contains: a server must look for every one."""
OTHERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 1},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0},
) * 2
"""Sampling parameters of other requests that run while one is checked: a server must not mix them up."""


async def check_fixed_prompts(server: ConnectedServer, tally: Tally, repeats: int) -> None:
    """Send the first `repeats` prompts in several ways, and compare the answers."""
    if server.policy.info.processed_logprobs is None:
        tally.skip("semantics", "The policy is too certain, or its context too short, to tell raw from processed.")
    else:
        tally.require("semantics", True, "")
    for text in PROMPTS[:repeats]:
        prompt = server.policy.template.first_prompt([{"role": "user", "content": [{"text": text}]}], None, None).ids
        if text == PROMPTS[0]:
            await routing.check_causality(server, tally, prompt)
        await _check_top_logprobs(server, tally, prompt)
        first = await _greedy(server, prompt)
        await _check_sampling_parameters(server, tally, prompt, first, text)
        await _check_stop_string(server, tally, prompt, first)
        one, other = [await _sample(server, prompt, temperature=1.0, seed=11) for _ in range(2)]
        if server.target.seeds or np.array_equal(one.output_ids, other.output_ids):
            _compare(server, tally, "seeded", one, other, text)
        else:
            tally.skip("seeded", "The server does not obey seeds; --seeds makes that an error.")
        _compare(server, tally, "repeatable", first, await _greedy(server, prompt), text)
        watched, *_ = await asyncio.gather(
            _greedy(server, prompt),
            *(_sample(server, prompt[: len(prompt) - 1 - n % 3], **other) for n, other in enumerate(OTHERS)),
        )
        _compare(server, tally, "alone", first, watched, text)


async def _greedy(server: ConnectedServer, prompt: TokenIds) -> TokenResponse:
    return await _sample(server, prompt, temperature=0.0)


async def _sample(
    server: ConnectedServer, prompt: TokenIds, *, streamed: bool = False, **sampling: Any
) -> TokenResponse:
    params = server.sampling(**{"max_new_tokens": MAX_TOKENS, **sampling})
    request, start = TokenRequest(prompt, params, uuid.uuid4().hex), server.log_position()
    response = await generate(server.policy.backend, request, (lambda _: None) if streamed else None)
    requested = params.model_dump()
    for each in server.generations(start):
        if each.request_id == request.request_id:
            for check, problem, *_ in compare_sampling(requested, each.sampling, requested, params.max_new_tokens):
                raise BrokenLawError(check, problem, Where(sampling=sampling, streamed=streamed))
    return response


async def _check_top_logprobs(server: ConnectedServer, tally: Tally, prompt: TokenIds) -> None:
    """Let the server score each of its top tokens after a prompt."""
    info, backend = server.policy.info, server.policy.backend
    sampling = server.sampling(max_new_tokens=1, temperature=1.0)
    k = min(MAX_TOP, info.capabilities.top_logprobs or 0)
    if not k or not semantics_of(info, sampling).comparable_with_scoring():
        return
    optional_outputs = OptionalOutputs(top_logprobs=k)
    answer = await generate(
        backend, TokenRequest(prompt, sampling, uuid.uuid4().hex, optional_outputs=optional_outputs)
    )
    ids, logprobs = (answer.columns[name].values[0].tolist() for name in ("top_ids", "top_logprobs"))
    for token, logprob in zip(ids, logprobs, strict=True):
        apart = abs(float((await score(backend, [*prompt.tolist(), token]))[-1]) - logprob)
        problem = f"top token {token} has logprob {logprob:.4g}, {apart:.4g} nats from the server's own score."
        tally.require("top", apart <= server.tolerance_nats, problem)


async def _check_sampling_parameters(
    server: ConnectedServer, tally: Tally, prompt: TokenIds, greedy: TokenResponse, text: str
) -> None:
    """Send parameters whose effect is visible in the answer."""
    top_one = await _sample(server, prompt, temperature=1.0, top_k=1)
    one, other = greedy, top_one
    if server.policy.info.truncated_logprobs is not False:  # then the logprobs of top_k=1 are 0, and a greedy one's not
        one, other = await _scored(server, prompt, greedy), await _scored(server, prompt, top_one)
    _compare(server, tally, "obeyed", one, other, f"{text} with top_k=1")
    on = await _sample(server, prompt, temperature=1.0, ignore_eos=True)
    count = len(on.output_ids)
    tally.require("obeyed", count == MAX_TOKENS, f"ignore_eos: the answer has {count} tokens, not {MAX_TOKENS}.")
    first = int(greedy.output_ids[0])
    biased_to_stop: dict[str, Any] = {"extra": {"logit_bias": {str(first): 100.0}}}
    try:
        for streamed, more in ((False, dict[str, Any]()), (can_stream(server.backend), biased_to_stop)):
            least = await _sample(
                server,
                prompt,
                streamed=streamed,
                temperature=0.0,
                stop_token_ids=(first,),
                min_new_tokens=LEAST_TOKENS,
                **more,
            )
            problem = (
                f"min_new_tokens={LEAST_TOKENS}: the answer has {len(least.output_ids)} tokens, "
                f"{least.output_ids.tolist()}; its likeliest first token {first} is a stop id."
            )
            tally.require("obeyed", len(least.output_ids) >= LEAST_TOKENS, problem)
    except BadRequestError as error:  # a server without a tokenizer knows no end of turn to hold back
        tally.skip("obeyed", f"min_new_tokens: {str(error).partition(chr(10))[0]}")
    try:
        biased = await _sample(server, prompt, temperature=0.0, extra={"logit_bias": {str(first): -100.0}})
        problem = f"token {first} was sampled in spite of a logit_bias of -100."
        tally.require("obeyed", first not in biased.output_ids, problem)
    except BadRequestError as error:
        tally.skip("obeyed", f"logit_bias: {str(error).partition(chr(10))[0]}")
    await _check_stop_ids(server, tally, prompt, greedy, text)


async def _check_stop_ids(
    server: ConnectedServer, tally: Tally, prompt: TokenIds, greedy: TokenResponse, text: str
) -> None:
    """Sample again with tokens of a greedy answer as stop ids: the first one, and one out of its middle."""
    ids = greedy.output_ids.tolist()
    size, first = server.policy.info.vocab_size or len(server.policy.tokenizer), ids[0]
    below = next((token for token in range(first) if token not in ids), first)
    above = next((token for token in range(first, size) if token not in ids), first)
    for stops in ((below, first), (first, above)):
        again = await _sample(server, prompt, temperature=0.0, stop_token_ids=stops)
        problem = f"the first token {first} is one of the stop ids {stops}, and did not end the answer."
        tally.require("obeyed", len(again.output_ids) == 1, problem)
    new = [at for at in range(1, len(ids) - 1) if ids[at] not in ids[:at]]
    if new:
        at = new[len(new) // 2]
        ended = await _sample(server, prompt, temperature=0.0, stop_token_ids=(ids[at],))
        expected = replace(greedy, output_ids=greedy.output_ids[: at + 1], logprobs=greedy.logprobs[: at + 1])
        _compare(server, tally, "obeyed", expected, ended, f"{text} with its token {at}, {ids[at]}, as a stop id")
    for ended in (again, greedy):
        if ended.finish == Finish.STOP:
            await _check_stop_at_the_limit(server, tally, prompt, ended)


async def _check_stop_string(server: ConnectedServer, tally: Tally, prompt: TokenIds, greedy: TokenResponse) -> None:
    """Sample again with a letter out of the middle of an answer as stop string, which must end it."""
    tokenizer, ids = server.policy.tokenizer, greedy.output_ids.tolist()
    plain = [token for token in ids[len(ids) // 2 :] if token not in tokenizer.added_tokens_decoder]
    stop = next((letter for letter in str(tokenizer.decode(plain)) if letter.isascii() and letter.isalnum()), None)
    if stop is None:
        tally.skip("stopped", "A greedy answer has no letter to stop at.")
        return
    try:
        ended = await _sample(server, prompt, temperature=0.0, stop=(ABSENT, stop))
    except BadRequestError as error:
        tally.skip("stopped", f"The server refuses stop strings: {str(error).partition(': ')[2][:80]}")
        return
    before = str(tokenizer.decode(ended.output_ids[:-1]))
    tally.require("stopped", stop not in before, f"an answer continued after the stop string {stop!r}: {before!r}.")


async def _scored(server: ConnectedServer, prompt: TokenIds, answer: TokenResponse) -> TokenResponse:
    """Return an answer with the server's scores in place of its logprobs."""
    scores = await score(server.policy.backend, np.concatenate([prompt, answer.output_ids]))
    return replace(answer, logprobs=scores[len(prompt) :])


async def _check_stop_at_the_limit(
    server: ConnectedServer, tally: Tally, prompt: TokenIds, ended: TokenResponse
) -> None:
    """Sample again with exactly as many tokens as an answer had: its last token still ends it, not the limit."""
    stop = int(ended.output_ids[-1])
    limit = len(ended.output_ids)
    exact = await _sample(server, prompt, temperature=0.0, max_new_tokens=limit, stop_token_ids=(stop,))
    if np.array_equal(exact.output_ids, ended.output_ids):
        problem = f"the finish reason is {exact.finish}, but the last token {stop} is a stop id."
        tally.require("finish", exact.finish == Finish.STOP, problem)


def _compare(
    server: ConnectedServer, tally: Tally, check: str, one: TokenResponse, other: TokenResponse, text: str
) -> None:
    """Require that two answers are equal up to the first near-tie."""
    near = max(NEAR_TIE_NATS, 2 * server.tolerance_nats)
    n = min(len(one.output_ids), len(other.output_ids))
    different = np.flatnonzero(one.output_ids[:n] != other.output_ids[:n])
    at = int(different[0]) if len(different) else n
    drift = float(np.max(np.abs(one.logprobs[:at] - other.logprobs[:at]), initial=0.0))
    if len(different):
        margin = abs(float(one.logprobs[at] - other.logprobs[at]))
        problem = f"{text!r}: token {at} is {one.output_ids[at]}, then {other.output_ids[at]}, {margin:.3g} nats apart."
        where = Where(None, at, int(other.output_ids[at]), streamed=False)
        tally.require(check, margin <= near, problem, 1, where)
        tally.notes.append(f"Near-tie: {problem}")
    else:
        lengths = [len(each.output_ids) for each in (one, other)]
        problem = f"{text!r}: the answers have {lengths[0]} and {lengths[1]} tokens."
        tally.require(check, lengths[0] == lengths[1], problem)
    tally.require(check, drift <= near, f"{text!r}: the tokens are equal, but logprobs are {drift:.3g} nats apart.")
