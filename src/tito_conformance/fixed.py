"""Checks with fixed requests: likeliest tokens and scores of prefixes, experts, aborts and pictures."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_conformance.bets import center
from tito_conformance.checks import NOWHERE, Tally, Where, place, set_place, together
from tito_conformance.oracle import offsets
from tito_conformance.target import ConnectedServer, can_stream
from tito_conformance.testing.pictures import picture, same_pixels
from tito_core.backend import OptionalOutputs
from tito_core.backend.generate import score
from tito_core.backend.images import PromptImages
from tito_core.backend.protocol import TokenChunk, TokenResponse
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.semantics import semantics_of
from tito_core.ledger import Adapter, Finish
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.turn import Image

ABSENT = "\N{SNOWMAN} \N{SNOWMAN}"
"""A second stop string, which no answer contains: a server must look for every one."""
MAX_TOP = 4
"""Largest `top_logprobs` that is requested."""
NEAR_TIE_NATS = 0.02
"""Two tokens this close are a near-tie: either may be sampled. Twice the tolerance counts if it is larger."""
LAST_TOKENS = 4
"""Other tokens that replace a prompt's last one."""
MAX_CHANGED_SHARE = 0.5
"""A row may change with this share of those tokens, though they come later: a router's near-tie falls now and then."""


async def check_prefixes(server: ConnectedServer, tally: Tally, prompts: Sequence[TokenIds]) -> None:
    """Let the server score each of its likeliest tokens after two prompts, in turn.

    The prompt of all of a prompt's sequences is the same, so its scores are, too, whatever was scored in between.
    """
    info, backend, tolerance = server.policy.info, server.policy.backend, server.tolerance_nats
    sampling = server.sampling(max_new_tokens=1, temperature=1.0)
    k = min(MAX_TOP, info.capabilities.top_logprobs or 0)
    if not k or not semantics_of(info, sampling).comparable_with_scoring():
        return
    answers = [await server.answer(each, sampling, outputs=OptionalOutputs(top_logprobs=k)) for each in prompts]
    server.recorder.compared("top", "score", *(each.request_id for each in answers))
    before: dict[int, Logprobs] = {}
    for rank in range(k):
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            token, logprob = (int(answer.columns["top_ids"].values[0][rank]), answer.columns["top_logprobs"].values[0])
            if token == -1:
                continue
            scores = await score(backend, [*prompt.tolist(), token])
            apart = abs(float(scores[-1] - logprob[rank]))
            problem = (
                f"top token {token} has logprob {logprob[rank]:.4g}, {apart:.4g} nats from the server's own score."
            )
            tally.require("top", apart <= tolerance, problem)
            same_prefix(tally, before.setdefault(number, scores), scores, len(prompt), tolerance)


def same_prefix(tally: Tally, one: Logprobs, other: Logprobs, length: int, tolerance: float) -> None:
    """Require that two sequences with the same first `length` tokens have the same scores of these."""
    apart = np.abs(one[1:length] - other[1:length])
    wrong = (np.flatnonzero(apart > tolerance) + 1).tolist()
    problem = (
        f"two sequences begin with the same {length} tokens, and their scores differ by up to "
        f"{float(apart.max(initial=0.0)):.4g} nats at {offsets(wrong, length)}."
    )
    differences = tuple((at, float(one[at]), float(other[at])) for at in wrong)
    tally.require("scored", not wrong, problem, length - 1, Where(differences=differences))


def require_scores(
    server: ConnectedServer,
    tally: Tally,
    check: str,
    own: Logprobs,
    signed: NDArray[Any],
    where: Where = NOWHERE,
    *,
    when: str = "",
    places: Sequence[int] | None = None,
) -> None:
    """Require that reported logprobs are the server's own scores of the same tokens; `signed` is their difference.

    `when` begins the sentence of a finding, and `places` are the tokens' offsets in the output, if not all.
    """
    if not len(own):
        return
    tolerance, off = server.tolerance_nats, np.abs(signed)
    wrong, at = np.flatnonzero(~(off <= tolerance)).tolist(), int(np.argmax(off))
    offset = list(range(len(own)) if places is None else places)
    scores, shifts = own - signed, ""
    for side, one, other in (("after", own[:-1], scores[1:]), ("before", own[1:], scores[:-1])):
        if len(own) > 2 and bool(np.all(np.abs(one - other) <= tolerance)):
            shifts = f" They are shifted by one: each is the score of the token {side} it."
    problem = (
        f"{when}the logprob differs by {off[at]:.4g} nats from the server's own score, more than {tolerance:g}, at "
        f"{offsets([offset[each] for each in wrong], len(own))}.{shifts}"
    )
    server.recorder.compared("logprobs", "score", where.within(place()).request_id)
    differences = tuple((offset[each], float(own[each] - signed[each]), float(own[each])) for each in wrong)
    tally.scored_nats = max(tally.scored_nats, float(off[at]))
    tally.require(check, not wrong, problem, len(own), replace(where, position=offset[at], differences=differences))


def require_unbiased(server: ConnectedServer, tally: Tally, signed: NDArray[Any], share: float, where: Where) -> None:
    """Require that differences of logprobs and scores have no direction: neither their mean nor their median."""
    middle, bound = center(signed), share * server.tolerance_nats
    problem = (
        f"{len(signed)} sampled tokens' logprobs are {middle:+.4g} nats from the server's own scores in the mean or "
        f"median, more than {bound:.2g}: noise has no direction."
    )
    tally.require("rescored", abs(middle) <= bound, problem, 0, where)


async def compare_scores(
    server: ConnectedServer,
    tally: Tally,
    check: str,
    ids: TokenIds,
    own: Logprobs,
    sampling: SamplingParams,
    when: str,
) -> Logprobs | None:
    """Let the server score a sequence whose last tokens were sampled with these logprobs.

    Returns:
        All scores, shape (len(ids),); None if they cannot be compared with the logprobs.
    """
    if not semantics_of(server.policy.info, sampling).comparable_with_scoring():
        return None
    scores, start = await score(server.policy.backend, ids), len(ids) - len(own)
    token = [int(each) for each in ids[start:]]
    signed = own.astype(np.float64) - scores[start:]
    where = Where(token=token[int(np.argmax(np.abs(signed)))] if token else None)
    require_scores(server, tally, check, own, signed, where, when=f"{when}, ")
    return scores


SCORED = 8
"""Answers of each stage that are scored: the last ones of their kinds, and the last and the first one of all."""


async def check_unscored(server: ConnectedServer, tally: Tally) -> None:
    """Let the server score a few answers of the stage that ends here: it may have read another prompt by then."""
    if server.live_version is None and server.weight_updates:
        return  # without versions nothing tells which weights sampled an answer
    limit, chosen = server.policy.info.max_model_len, dict[str, tuple[Any, ...]]()
    for each in server.unscored:
        kind = server.recorder.answers[each[2].request_id].kind
        chosen = {name: other for name, other in chosen.items() if name != kind} | {kind: each}
    few = [*list(chosen.values())[: -SCORED - 1 : -1], *server.unscored[:1], *server.unscored[-2:-1]]
    for prompt, sampling, response in {id(each[2]): each for each in few}.values():
        ids = np.concatenate([prompt, response.output_ids])
        if len(response.output_ids) and (limit is None or len(ids) + SPARE <= limit):
            set_place(sampling=sampling.model_dump(mode="json", exclude_defaults=True), request_id=response.request_id)
            await compare_scores(server, tally, "rescored", ids, response.logprobs, sampling, "scored afterwards")


SPARE = 16
"""Tokens of a context that stay free: vLLM needs one to score, SGLang six."""


async def check_causality(server: ConnectedServer, tally: Tally, prompt: TokenIds) -> None:
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
        response = await server.answer(ids, sampling, outputs=OptionalOutputs(routed_experts=shape or True))
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
"""Seconds within which the rest of an answer may come after its abort is confirmed, or all of it without a stream: it
was sampled before the abort."""


ABORTS = 3
"""Streams that are aborted, one after the other."""


async def check_abort(server: ConnectedServer, tally: Tally) -> None:
    """Start several streams, abort all but the last one after another, and wait for all."""
    if not can_stream(server.backend):
        tally.skip("aborted", "The backend does not stream, so the start of a request is unknown.")
        return
    limit = server.policy.info.max_model_len
    prompt = server.prompt_of("Count for ever.")
    if limit is not None and len(prompt) + ABORTED_TOKENS > limit:
        tally.skip("aborted", f"An answer of {ABORTED_TOKENS} tokens does not fit into the context of {limit}.")
        return
    parameters = {"max_new_tokens": ABORTED_TOKENS, "temperature": 1.0, "ignore_eos": True}
    sampling = server.sampling(**parameters)
    set_place(sampling=parameters, streamed=True)
    aborts, other = await _abort_all_but_one(server, prompt, sampling)
    received = len(other.output_ids)
    problem = f"other requests were aborted, and this one got {received} of {ABORTED_TOKENS} tokens."
    tally.require("aborted", received == ABORTED_TOKENS, problem, 0)
    exchanges = server.recorder.log.exchanges
    sent = [each.status for each in exchanges if "abort" in each.path]
    early = all(abort.early for abort in aborts)
    tally.require("aborted", early or not exchanges or bool(sent), "the client sent no abort.", 0)
    if sent and sent[-1] != 200:
        tally.skip("aborted", f"The server answered an abort with status {sent[-1]}.")
        return
    for number, abort in enumerate(aborts, 1):
        output = abort.aborted.output_ids
        if abort.early or (
            len(output) == ABORTED_TOKENS and (abort.seconds < SOON_S or await _is_instant(server, prompt, sampling))
        ):
            tally.skip("aborted", "The answer was complete before the abort, or within moments of it.")
            continue
        ended = abort.aborted.finish == Finish.ABORT and len(output) < ABORTED_TOKENS
        problem = (
            f"abort {number} of {ABORTS}: the request went on to {len(output)} tokens ({abort.aborted.finish}) "
            "although it was aborted."
        )
        tally.require("aborted", ended, problem)
        late = len(output) - abort.known
        problem = f"{late} tokens of an aborted request arrived after its abort was confirmed, more than {LATE_TOKENS}."
        tally.require("aborted", late <= LATE_TOKENS, problem)
        if number == 1:
            ids = np.concatenate([prompt, output])
            await compare_scores(server, tally, "rescored", ids, abort.aborted.logprobs, sampling, "after an abort")


async def _is_instant(server: ConnectedServer, prompt: TokenIds, sampling: SamplingParams) -> bool:
    """Return whether an answer is sampled in moments: through a slow pipe, its stream comes long after that."""
    began = time.monotonic()
    await server.answer(prompt, sampling)
    return time.monotonic() - began < SOON_S


class Arrivals:
    """Counts the tokens of a streamed answer, as its `on_chunk`; `enough` is set once there are `least`."""

    def __init__(self, least: int = 1) -> None:
        self.least, self.tokens, self.enough = least, 0, asyncio.Event()

    def __call__(self, chunk: TokenChunk) -> None:
        """Count a chunk."""
        self.tokens += len(chunk.output_ids)
        if self.tokens >= self.least:
            self.enough.set()


@dataclass(frozen=True)
class Abort:
    """A stream that was aborted.

    Attributes:
        early: Whether it was complete before its abort.
        known: Its tokens that had arrived when its abort was confirmed.
        aborted: Its answer.
        seconds: From the confirmation to its end.
    """

    early: bool
    known: int
    aborted: TokenResponse
    seconds: float


async def _abort_all_but_one(
    server: ConnectedServer, prompt: TokenIds, sampling: SamplingParams
) -> tuple[list[Abort], TokenResponse]:
    """Return the aborted streams, and the answer of the last one, which was not."""
    begun, ends = {uuid.uuid4().hex: Arrivals() for _ in range(ABORTS + 1)}, dict[str, float]()

    async def one(name: str) -> TokenResponse:
        try:
            return await server.answer(prompt, sampling, on_chunk=begun[name], request_id=name)
        finally:
            ends[name] = time.monotonic()
            begun[name].enough.set()

    *names, last = begun
    server.aborting.update(names)
    tasks = {name: asyncio.create_task(one(name)) for name in begun}
    aborts: list[tuple[bool, int, float]] = []
    try:
        for name in begun:
            await begun[name].enough.wait()
        for name in names:
            early = tasks[name].done()
            await server.policy.backend.abort(name)
            aborts.append((early, begun[name].tokens, time.monotonic()))
        done = [
            Abort(early, known, await tasks[name], ends[name] - at)
            for name, (early, known, at) in zip(names, aborts, strict=True)
        ]
        return done, await tasks[last]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def check_adapters(server: ConnectedServer, tally: Tally) -> None:
    """Sample one prompt with the model alone and with each adapter at once, and score each answer by all of them."""
    adapters: list[Adapter | None] = [None, *map(Adapter, server.target.adapters)]
    prompt = server.prompt_of("Say something that only you would say.")
    parameters = {"max_new_tokens": ADAPTED_TOKENS, "temperature": 1.0, "ignore_eos": True}
    sampling, tolerance = server.sampling(**parameters), server.tolerance_nats
    set_place(sampling=parameters)
    if not semantics_of(server.policy.info, sampling).comparable_with_scoring():
        tally.skip("adapted", "The server's logprobs cannot be compared with its scores.")
        return
    answers = await together(server.answer(prompt, sampling, adapter=adapter) for adapter in adapters)
    for adapter, answer in zip(adapters, answers, strict=True):
        ids, name = np.concatenate([prompt, answer.output_ids]), adapter or "the model alone"
        for other in adapters:
            scores = (await score(server.policy.backend, ids, adapter=other))[len(prompt) :]
            apart = float(np.max(np.abs(scores - answer.logprobs)))
            problem = (
                f"an answer of {name} differs by {apart:.4g} nats from its scores by {other or 'the model alone'}, "
            )
            if adapter == other:
                tally.require("adapted", apart <= tolerance, f"{problem}more than {tolerance:g}.", len(scores))
            else:
                problem += f"not by more than {tolerance:g}: both have the same effect."
                tally.require("adapted", apart > tolerance, problem)


ADAPTED_TOKENS = 24
"""Tokens of each answer with an adapter."""
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
    prompt = _two_pictures(server)
    lengths = await _lengths(server, prompt, (one, other))
    first = await _scores(server, prompt, (one, other), lengths)
    for names, images, same_between in (
        ("A, C", (one, third), True),
        ("C, B", (third, other), False),
    ):
        found = await _scores(server, prompt, images, lengths)
        for between, own, values, same in zip(PLACES, first, found, (same_between, False), strict=True):
            apart = float(np.max(np.abs(own - values)))
            problem = (
                f"the scores of the tokens {between} two pictures are {apart:.4g} nats apart for the pictures A, B and "
                f"{names}, but should be {'equal' if same else 'different'}."
            )
            tally.require("looked", (apart <= server.tolerance_nats) == same, problem)


async def check_after_update(server: ConnectedServer, tally: Tally) -> None:
    """Check that a picture which the server has seen is read as if it were new: by the weights of now.

    The same pixels in files that the server has never seen cannot be in any cache.
    """
    prompt, known = _two_pictures(server), (image_of(PICTURE_SEEDS[0]), image_of(PICTURE_SEEDS[1]))
    lengths = await _lengths(server, prompt, known)
    new = (image_of(PICTURE_SEEDS[0], uuid.uuid4().hex), image_of(PICTURE_SEEDS[1], uuid.uuid4().hex))
    old, fresh = [np.concatenate(await _scores(server, prompt, images, lengths)) for images in (known, new)]
    apart = float(np.max(np.abs(old - fresh)))
    problem = (
        f"with the weights {server.live_version}, tokens behind pictures that the server saw before "
        f"have other scores than behind new files of the same pixels, by up to {apart:.4g} nats."
    )
    tally.require("fresh", apart <= server.tolerance_nats, problem)


PLACES = ("between", "after")
"""Where the tokens are that a prompt with two pictures scores: the first depend on the first picture alone."""


def image_of(seed: int, comment: str | None = None) -> Image:
    """Return a picture, or with a comment another file of the same pixels."""
    data = picture(seed, PICTURE_SIZE, PICTURE_SIZE)
    return Image(data if comment is None else same_pixels(data, comment), "png", PICTURE_SIZE, PICTURE_SIZE)


def _two_pictures(server: ConnectedServer) -> TokenIds:
    """Return a collapsed prompt with two pictures and texts between and after them."""
    blank = {"image": {"format": "png", "source": {"bytes": b""}}}
    texts = ("This is one of two. The other one follows.", "Compare both, please.")
    blocks: Any = [block for text in texts for block in (blank, {"text": text})]
    return server.policy.template.first_prompt([{"role": "user", "content": blocks}], None, None).ids


async def _lengths(server: ConnectedServer, prompt: TokenIds, images: tuple[Image, ...]) -> tuple[int, ...]:
    """Let the server expand the pictures; return their numbers of tokens."""
    pictures = PromptImages(images, _placeholder(server))
    response = await server.answer(prompt, SamplingParams(max_new_tokens=1, temperature=0.0), images=pictures)
    return tuple(length for _, length in response.media)


async def _scores(
    server: ConnectedServer, prompt: TokenIds, images: tuple[Image, ...], lengths: Sequence[int]
) -> tuple[Logprobs, Logprobs]:
    """Return the scores of the tokens between two pictures and of those after both: see `PLACES`."""
    placeholder = _placeholder(server)
    values = await score(server.policy.backend, prompt, PromptImages(images, placeholder, tuple(lengths)))
    begin, second = np.flatnonzero(prompt == placeholder).tolist()
    return values[begin + lengths[0] : second + lengths[0] - 1], values[second + sum(lengths) - 1 :]


def _placeholder(server: ConnectedServer) -> int:
    found = server.policy.template.placeholder_id
    assert found is not None  # the suite asks only servers whose template shows images
    return found
