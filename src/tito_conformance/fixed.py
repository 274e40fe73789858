"""Checks with fixed requests: repeated and concurrent ones, seeds, sampling parameters, aborts and pictures."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tito_conformance.checks import BrokenLawError, Tally, Where, set_place
from tito_conformance.oracle import compare_sampling
from tito_conformance.target import ConnectedServer, can_stream
from tito_conformance.testing.pictures import picture, same_pixels
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import BadRequestError
from tito_core.backend.generate import generate, score
from tito_core.backend.images import PromptImages
from tito_core.backend.protocol import TokenChunk, TokenRequest, TokenResponse
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.semantics import semantics_of
from tito_core.ledger import Finish
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.turn import Image

PROMPTS = ("Count to ten.", "Name a colour.", "Write a line about rain.", "What is 17 * 3?")
ABSENT = "\N{SNOWMAN} \N{SNOWMAN}"
"""A second stop string, which no answer contains: a server must look for every one."""
MAX_TOKENS = 24
LEAST_TOKENS = 4
"""`min_new_tokens` of an answer whose first token would end it."""
MAX_TOP = 4
"""Largest `top_logprobs` that is requested."""
NEAR_TIE_NATS = 0.02
"""Two tokens this close are a near-tie: either may be sampled. Twice the tolerance counts if it is larger."""
OTHERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 1},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.0},
) * 2
"""Sampling parameters of other requests that run while one is checked: a server must not mix them up."""
LAST_TOKENS = 4
"""Other tokens that replace a prompt's last one."""
MAX_CHANGED_SHARE = 0.5
"""A row may change with this share of those tokens, though they come later: a router's near-tie falls now and then."""


async def check_fixed_prompts(server: ConnectedServer, tally: Tally, repeats: int) -> None:
    """Send the first `repeats` prompts in several ways, and compare the answers."""
    if server.policy.info.processed_logprobs is None:
        tally.skip("semantics", "The policy is too certain, or its context too short, to tell raw from processed.")
    else:
        tally.require("semantics", True, "")
    for text in PROMPTS[:repeats]:
        prompt = server.policy.template.first_prompt([{"role": "user", "content": [{"text": text}]}], None, None).ids
        if text == PROMPTS[0]:
            await _check_causality(server, tally, prompt)
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


async def _scored(server: ConnectedServer, prompt: TokenIds, answer: TokenResponse) -> TokenResponse:
    """Return an answer with the server's scores in place of its logprobs."""
    scores = await score(server.policy.backend, np.concatenate([prompt, answer.output_ids]))
    return replace(answer, logprobs=scores[len(prompt) :])


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


async def _check_causality(server: ConnectedServer, tally: Tally, prompt: TokenIds) -> None:
    """Replace a prompt's last token: only its own row may change, and must change for at least one replacement."""
    info, shape = server.policy.info, server.target.experts
    if not info.capabilities.routed_experts or (info.capabilities.expert_shape is not True and shape is None):
        return
    sampling = SamplingParams(max_new_tokens=1, temperature=1.0, top_k=1, ignore_eos=True)
    others = [token for token in dict.fromkeys(prompt.tolist()) if token != prompt[-1]][:LAST_TOKENS]
    rows = []
    for last in (int(prompt[-1]), *others):
        ids = prompt.copy()
        ids[-1] = last
        request = TokenRequest(
            ids, sampling, uuid.uuid4().hex, optional_outputs=OptionalOutputs(routed_experts=shape or True)
        )
        response = await generate(server.policy.backend, request)
        rows.append(np.sort(response.columns["routed_experts"].values[: len(ids)], -1))
    changes = np.mean([(row != rows[0]).any(axis=(1, 2)) for row in rows[1:]], axis=0)
    worst = int(np.argmax(changes[:-1]))
    problem = f"the experts of token {worst} change with a later token, number {len(prompt) - 1}."
    tally.require("routed", float(changes[worst]) <= MAX_CHANGED_SHARE, problem, len(others))
    problem = f"the experts of token {len(prompt) - 1} are the same for {len(rows)} different tokens."
    tally.require("routed", changes[-1] > 0, problem)


ABORTED_TOKENS = 180
"""Tokens of each answer, enough for an abort to arrive before the last one."""
LATE_TOKENS = 48
"""Tokens that may come after an abort is confirmed: those of the steps in progress, and those in transfer."""
SOON_S = 0.2
"""Seconds within which the rest of an answer may come after its abort is confirmed: it was sampled before."""


async def check_abort(server: ConnectedServer, tally: Tally) -> None:
    """Start two streams, abort the first after its first token, and wait for both."""
    if not can_stream(server.backend):
        tally.skip("aborted", "The backend does not stream, so the start of a request is unknown.")
        return
    limit = server.policy.info.max_model_len
    messages: list[Any] = [{"role": "user", "content": [{"text": "Count for ever."}]}]
    prompt = server.policy.template.first_prompt(messages, None, None).ids
    if limit is not None and len(prompt) + ABORTED_TOKENS > limit:
        tally.skip("aborted", f"An answer of {ABORTED_TOKENS} tokens does not fit into the context of {limit}.")
        return
    parameters = {"max_new_tokens": ABORTED_TOKENS, "temperature": 1.0, "ignore_eos": True}
    sampling = server.sampling(**parameters)
    set_place(sampling=parameters, streamed=True)
    abort = await _abort_one_of_two(server, prompt, sampling)
    received = len(abort.other.output_ids)
    problem = f"another request was aborted, and this one got {received} of {ABORTED_TOKENS} tokens."
    tally.require("aborted", received == ABORTED_TOKENS, problem, 0)
    sent = [] if server.log is None else [each.status for each in server.log.exchanges if "abort" in each.path]
    tally.require("aborted", abort.early or server.log is None or bool(sent), "the client sent no abort.", 0)
    output = abort.aborted.output_ids
    if sent and sent[-1] != 200:
        tally.skip("aborted", f"The server answered an abort with status {sent[-1]}.")
        return
    if abort.early or (len(output) == ABORTED_TOKENS and abort.seconds < SOON_S):
        tally.skip("aborted", "The answer was complete before the abort, or within moments of it.")
        return
    ended = abort.aborted.finish == Finish.ABORT and len(output) < ABORTED_TOKENS
    problem = f"a request went on to {len(output)} tokens ({abort.aborted.finish}) although it was aborted."
    tally.require("aborted", ended, problem)
    late = len(output) - abort.known
    problem = f"{late} tokens of an aborted request arrived after its abort was confirmed, more than {LATE_TOKENS}."
    tally.require("aborted", late <= LATE_TOKENS, problem)
    if semantics_of(server.policy.info, sampling).comparable_with_scoring() and len(output):
        scores = (await score(server.policy.backend, np.concatenate([prompt, output])))[len(prompt) :]
        apart = float(np.max(np.abs(scores - abort.aborted.logprobs)))
        problem = f"a token of an aborted answer is {apart:.4g} nats from the server's own score."
        tally.require("rescored", apart <= server.tolerance_nats, problem, len(scores))


@dataclass(frozen=True)
class Abort:
    """Two streams, of which the first was aborted.

    Attributes:
        early: Whether the first was complete before its abort.
        known: Tokens of the first that had arrived when its abort was confirmed.
        seconds: From then to its end.
        aborted: Its answer.
        other: The answer of the second.
    """

    early: bool
    known: int
    seconds: float
    aborted: TokenResponse
    other: TokenResponse


async def _abort_one_of_two(server: ConnectedServer, prompt: TokenIds, sampling: SamplingParams) -> Abort:
    names, counts, runs = [uuid.uuid4().hex for _ in range(2)], Counter[str](), [asyncio.Event() for _ in range(2)]

    async def one(name: str, begun: asyncio.Event) -> TokenResponse:
        def count(chunk: TokenChunk) -> None:
            counts[name] += len(chunk.output_ids)
            begun.set()

        return await generate(server.policy.backend, TokenRequest(prompt, sampling, name), count)

    tasks = [asyncio.ensure_future(one(name, begun)) for name, begun in zip(names, runs, strict=True)]
    waits = [asyncio.ensure_future(begun.wait()) for begun in runs]
    try:
        for wait, task in zip(waits, tasks, strict=True):
            await asyncio.wait([wait, task], return_when=asyncio.FIRST_COMPLETED)
        early = tasks[0].done()
        await server.policy.backend.abort(names[0])
        known = counts[names[0]]
        confirmed = time.monotonic()
        aborted = await tasks[0]
        return Abort(early, known, time.monotonic() - confirmed, aborted, await tasks[1])
    finally:
        for each in (*waits, *tasks):
            each.cancel()
        await asyncio.gather(*waits, *tasks, return_exceptions=True)


PICTURE_SEEDS = (101, 102, 103)
"""Pictures of one size, which no conversation shows."""
PICTURE_SIZE = 64
"""Sides of the pictures, in pixels."""


async def check_pictures(server: ConnectedServer, tally: Tally) -> None:
    """Check that scores depend on each picture, and on nothing else about it.

    The tokens between two pictures depend on the first alone, so that a server which exchanges them, drops one or
    reads another one is noticed although its echo is right.
    """
    one, other, third = map(image_of, PICTURE_SEEDS)
    prompt = prompt_of(server)
    lengths = await _lengths(server, prompt, (one, other))
    scores = {
        names: await _scores(server, prompt, images, lengths)
        for names, images in {
            "A, B": (one, other),
            "B, A": (other, one),
            "A, C": (one, third),
            "C, B": (third, other),
            "A, B again": (one, other),
            "A, B as other files": (image_of(PICTURE_SEEDS[0], "one"), image_of(PICTURE_SEEDS[1], "other")),
        }.items()
    }
    first, tolerance = scores["A, B"], server.tolerance_nats
    for names, same_between, same_after in (
        ("B, A", False, False),
        ("A, C", True, False),
        ("C, B", False, False),
        ("A, B again", True, True),
        ("A, B as other files", True, True),
    ):
        for place, same in (("between", same_between), ("after", same_after)):
            apart = float(np.max(np.abs(getattr(first, place) - getattr(scores[names], place))))
            problem = (
                f"the scores of the tokens {place} two pictures are {apart:.4g} nats apart for the pictures A, B and "
                f"{names}, but should be {'equal' if same else 'different'}."
            )
            tally.require("looked", (apart <= tolerance) == same, problem)


async def check_after_update(server: ConnectedServer, tally: Tally) -> None:
    """Check that new weights read a picture which older weights have read too.

    The same pixels in files that the server has never seen cannot be in any cache.
    """
    prompt, known = prompt_of(server), (image_of(PICTURE_SEEDS[0]), image_of(PICTURE_SEEDS[1]))
    lengths = await _lengths(server, prompt, known)
    version = str(server.live_version)
    new = tuple(image_of(seed, f"{version} {uuid.uuid4().hex}") for seed in PICTURE_SEEDS[:2])
    old, fresh = [await _scores(server, prompt, images, lengths) for images in (known, (new[0], new[1]))]
    apart = max(float(np.max(np.abs(getattr(old, place) - getattr(fresh, place)))) for place in ("between", "after"))
    problem = (
        f"after the update to {version!r}, tokens behind pictures that the server saw before have other scores than "
        f"behind new files of the same pixels, by up to {apart:.4g} nats."
    )
    tally.require("fresh", apart <= server.tolerance_nats, problem)


@dataclass(frozen=True)
class Scored:
    """Scores of a prompt with two pictures.

    Attributes:
        between: Scores of the tokens between the pictures, which depend on the first alone.
        after: Scores of the tokens after both.
    """

    between: Logprobs
    after: Logprobs


def image_of(seed: int, comment: str | None = None) -> Image:
    """Return a picture, or with a comment another file of the same pixels."""
    data = picture(seed, PICTURE_SIZE, PICTURE_SIZE)
    return Image(data if comment is None else same_pixels(data, comment), "png", PICTURE_SIZE, PICTURE_SIZE)


def prompt_of(server: ConnectedServer) -> TokenIds:
    """Return a collapsed prompt with two pictures and texts between and after them."""
    blank = {"image": {"format": "png", "source": {"bytes": b""}}}
    blocks: Any = [
        blank,
        {"text": "This is one of two. The other one follows."},
        blank,
        {"text": "Compare both, please."},
    ]
    return server.policy.template.first_prompt([{"role": "user", "content": blocks}], None, None).ids


async def _lengths(server: ConnectedServer, prompt: TokenIds, images: tuple[Image, ...]) -> tuple[int, ...]:
    """Let the server expand the pictures; return their numbers of tokens."""
    pictures = PromptImages(images, _placeholder(server))
    request = TokenRequest(prompt, SamplingParams(max_new_tokens=1, temperature=0.0), uuid.uuid4().hex, images=pictures)
    response = await generate(server.policy.backend, request)
    return tuple(length for _, length in response.media)


async def _scores(
    server: ConnectedServer, prompt: TokenIds, images: tuple[Image, ...], lengths: Sequence[int]
) -> Scored:
    placeholder = _placeholder(server)
    values = await score(server.policy.backend, prompt, PromptImages(images, placeholder, tuple(lengths)))
    begin, second = np.flatnonzero(prompt == placeholder).tolist()
    middle = slice(begin + lengths[0], second + lengths[0] - 1)
    return Scored(values[middle], values[second + sum(lengths) - 1 :])


def _placeholder(server: ConnectedServer) -> int:
    found = server.policy.template.placeholder_id
    assert found is not None  # the suite asks only servers whose template shows images
    return found
