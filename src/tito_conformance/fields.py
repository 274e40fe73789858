"""Every sampling parameter with values that change the answer: alone and in pairs, whole, streamed and in one batch.

What a greedy answer becomes follows from the likeliest tokens in each place of the plain one, up to the first place
where another token is chosen. Seeded answers are compared with each other, and others with those before an extreme
request.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_conformance.bets import FALSE_ALARM
from tito_conformance.checks import Tally, Where, set_place, together
from tito_conformance.fixed import ABSENT, NEAR_TIE_NATS, check_causality, check_prefixes, compare_scores
from tito_conformance.oracle import offsets
from tito_conformance.sampler import QUESTIONS, Draw, Question, draw_of, drawn
from tito_conformance.semantics import LONG_PROMPTS, MAX_TOKENS, ask, ask_if_accepted, long_prompt, row
from tito_conformance.target import ConnectedServer, can_stream
from tito_core.backend.protocol import TokenResponse
from tito_core.ledger import Finish
from tito_core.ledger.columns import TokenIds

PROMPTS = ("Count to ten.", "Name a colour.", "Write a line about rain.", "What is 17 * 3?")
SEEDED_TOKENS = 8
"""Tokens of seeded answers: few, so that noise in the last bits of a probability seldom changes one."""
TRIES = 4
"""How often two equal seeds must give other answers before the server is blamed: each time at another temperature.
Even, as the order is reversed for the second answers: none may come after the same number of others twice."""
PAIRS = 6
"""Pairs of parameters that are drawn for each prompt."""
GREEDY_TOKENS = 80
"""Tokens of a greedy answer: enough that some occur several times."""
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
LIKE_GREEDY: tuple[dict[str, Any], ...] = (
    {"temperature": 1.487, "top_k": 1},
    {"temperature": 1.487, "min_p": 1.0},
)
"""Truncations that leave the likeliest token alone, so that the answer is the greedy one."""
NUCLEUS: Mapping[str, Any] = {"temperature": 1.0, "top_p": 0.013}
"""Another, where every likeliest token is twice as likely as this."""
SEEDED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.487, "top_k": 3},
    {"top_p": 0.913},
    {"min_p": 0.053},
    {"presence_penalty": 0.987, "frequency_penalty": 0.513},
    {"repetition_penalty": 1.213},
    {"temperature": 0.713, "top_k": 5, "top_p": 0.953},
)
"""Parameters that a seed is crossed with."""
SEEDS = (0, 11, 2**31 - 1, 2**32 - 5)
"""Zero counts as no seed where it is tested as a condition; others lose what a signed integer of 32 bits lacks."""
SURE, FORCING = 50.0, 100.0
"""Nats of bias that make a token the likeliest one wherever it is not listed, and those that are sent."""
FOREIGN = "\N{LATIN SMALL LETTER E WITH ACUTE}\N{EM DASH}\N{CJK UNIFIED IDEOGRAPH-4E2D}"
"""Letters of more than one byte, of which one that is a token is forced, and is a stop string."""
REPETITION = (0.087, 1.887)
"""Strong penalties: the first makes a token come again and again, the second seldom."""


async def check(server: ConnectedServer, tally: Tally, repeats: int) -> None:
    """Send the first `repeats` prompts with every parameter; the second one is long, if the context has room."""
    if server.policy.info.processed_logprobs is None:
        tally.skip("semantics", "The policy is too certain, or its context too short, to tell raw from processed.")
    else:
        tally.require("semantics", True, "")
    prompts = [server.prompt_of(text) for text in PROMPTS[:repeats]]
    await check_causality(server, tally, prompts[0])
    await check_prefixes(server, tally, [prompts[0], prompts[-1][len(prompts[-1]) // 2 :], prompts[0][:1]])
    limit = server.policy.info.max_model_len
    if repeats > 1 and (limit is None or limit > LONG_PROMPTS[0] + MAX_TOKENS):
        prompts[1] = long_prompt(server, LONG_PROMPTS[0])
    for number, prompt in enumerate(prompts):
        plain = await ask(server, prompt, GREEDY, likeliest=True)
        ids = np.concatenate([prompt, plain.output_ids])  # first: what follows leans on its logprobs
        await compare_scores(server, tally, "rescored", ids, plain.logprobs, server.sampling(**GREEDY), "greedy")
        await _check_batch(server, tally, prompt, plain, number)
        if number == 0:
            await _check_seeds(server, tally, prompt)
            await _check_state(server, tally, prompt, plain)


async def check_greedy(server: ConnectedServer, tally: Tally, penalised: bool | None) -> None:
    """Require that each token of long greedy answers is the likeliest one, also under penalties.

    `penalised` says whether reported logprobs include penalties; None if unknown.
    """
    if not server.most_top:
        return
    for number, text in enumerate(QUESTIONS[:2]):
        prompt, random = server.prompt_of(text), np.random.default_rng([server.target.seed, number])
        penalties = {f"{name}_penalty": drawn(random, 0.2, 0.9) for name in ("presence", "frequency")}
        for sampling in ({}, penalties) if penalised is not None else ({},):
            asked = {**GREEDY, "max_new_tokens": GREEDY_TOKENS, **sampling}
            answer = await _one(server, tally, prompt, asked, number, likeliest=True)
            if answer is not None:
                place = Where(sampling=asked, streamed=_streams(server, number), request_id=answer.request_id)
                moves = asked if not penalised else {"max_new_tokens": GREEDY_TOKENS}
                _require_expected(tally, Plain.of(server, answer), moves, answer, place)
                server.recorder.compared("ids", "likeliest", answer.request_id)
                # Half of the answer goes into the prompt, whose tokens must not count.
                prompt = np.concatenate([prompt, answer.output_ids[: len(answer.output_ids) // 2]])


def _bare(answer: TokenResponse) -> Draw:
    """Return an answer without likely tokens."""
    ids, nothing = answer.output_ids.astype(np.int64), np.zeros((len(answer.output_ids), 0))
    return Draw(ids, answer.logprobs.astype(np.float64), nothing.astype(np.int64), nothing, nothing)


@dataclass(frozen=True)
class Plain:
    """A greedy answer without further parameters, from which others follow.

    Attributes:
        draw: Its tokens; without the likeliest ones where the server reports too few.
        ends: Ids that end a turn.
        decode: Decodes ids.
        near: Tokens this close may be exchanged, in nats.
        foreign: A token whose text is not ASCII, with the text; empty if there is none.
    """

    draw: Draw
    ends: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    near: float
    foreign: Sequence[tuple[int, str]] = ()

    @classmethod
    def of(cls, server: ConnectedServer, answer: TokenResponse) -> Plain:
        """Return the plain answer of a server."""
        near = max(NEAR_TIE_NATS, 2 * server.tolerance_nats)
        draw = draw_of(answer) if "top_ids" in answer.columns else _bare(answer)
        encoded = [(server.policy.tokenizer.encode(each, add_special_tokens=False), each) for each in FOREIGN]
        foreign = [(ids[0], text) for ids, text in encoded if len(ids) == 1 and server.decode(ids) == text]
        return cls(draw, frozenset(server.policy.stop_token_ids), server.decode, near, foreign[:1])

    @property
    def ids(self) -> list[int]:
        """Its tokens."""
        ids: list[int] = self.draw.ids.tolist()
        return ids

    def scores(self, at: int, moves: Mapping[int, float], barred: frozenset[int]) -> list[tuple[float, int]]:
        """Return what tokens score in a place, best first; id -1 stands for all that are not listed."""
        listed = row(self.draw, at)
        forced = [(move, token) for token, move in moves.items() if move > SURE and token not in barred]
        if forced and max(forced)[1] not in listed:
            return [max(forced), (0.0, -1)]
        if not listed:
            known = not barred and not moves
            return [(0.0, self.ids[at])] if known else [(0.0, -1)]
        least = min(listed.values())
        others = least + max([0.0, *(move for token, move in moves.items() if token not in listed)])
        found = [(value + moves.get(token, 0.0), token) for token, value in listed.items() if token not in barred]
        return sorted([*found, (others, -1)], reverse=True)

    def expected(self, sampling: Mapping[str, Any]) -> Expected:
        """Return what the answer becomes under parameters that leave the likeliest token."""
        found, ties = list[int](), set[int]()
        bias = (sampling.get("extra") or {}).get("logit_bias", {})
        penalties, stops = Question("", sampling), self.ends | set(sampling.get("stop_token_ids", ()))
        least, most = sampling.get("min_new_tokens", 0), sampling.get("max_new_tokens", MAX_TOKENS)
        for at, own in enumerate(self.ids[:most]):
            moves = penalties.offsets(found)
            for token, value in bias.items():
                moves[int(token)] = moves.get(int(token), 0.0) + value
            (top, best), *others = self.scores(at, moves, stops if at < least else frozenset())
            tied = [token for value, token in others if top - value <= self.near]
            if tied:  # most probably the same token as before
                best = own if own in (best, *tied) else -1
                ties.add(at)
            if best == -1:
                return Expected(found, None, ties)
            found.append(best)
            if best in stops:
                return Expected(found, Finish.STOP, ties)
            if any(stop in self.decode(found) for stop in sampling.get("stop", ())):
                early = len(found) <= least  # vLLM looks for no stop string in the first tokens
                return Expected(found, None if early else Finish.STOP, ties)
            if best != own:
                return Expected(found, None, ties)
        return Expected(found, Finish.LENGTH if len(found) == most else None, ties)


@dataclass(frozen=True)
class Expected:
    """The beginning of an answer, why it ends there (None if it may go on), and at which offsets it may differ."""

    ids: list[int]
    finish: Finish | None = None
    ties: Set[int] = frozenset()


def alone(plain: Plain, random: np.random.Generator, vocabulary: int) -> Iterator[dict[str, Any]]:
    """Yield one parameter at a time, with a value that changes the plain answer as little more as it must."""
    ids, near = plain.ids, plain.near
    places, ends = [], []
    for at in range(1, len(ids)):
        (top, first), *others = plain.scores(at, {}, frozenset())
        ends += [(top - value, token) for value, token in others if token in plain.ends]
        if others and others[0][1] != -1 and near < top - others[0][0] < 8:
            places.append((top - others[0][0], first, others[0][1]))
    if places:
        for gap, first, second in (min(places), places[int(random.integers(len(places)))]):
            value = round(gap + 3 * near, 3)
            yield {"extra": {"logit_bias": {str(second): value}}}
            yield {"extra": {"logit_bias": {str(second): 0.001, str(first): -value}}}
    for gap, end in sorted(ends)[:1]:  # a bias that just ends the turn there, and one that just does not
        yield {"extra": {"logit_bias": {str(end): round(gap + 3 * near, 3)}}}
        yield {"extra": {"logit_bias": {str(end): round(gap - 3 * near, 3)}}}
    for end in sorted(plain.ends)[:1]:  # the first token ends it
        yield {"extra": {"logit_bias": {str(end): FORCING}}}
    for token, text in plain.foreign:
        yield {"extra": {"logit_bias": {str(token): FORCING}}, "stop": (ABSENT, text)}
    for name, signs in itertools.product(("presence_penalty", "frequency_penalty"), (1, -1)):
        for value in (0.213, 0.513, 0.987, 1.487, 1.987):
            changed = plain.expected({name: signs * value})
            if changed.ids != ids[: len(changed.ids)]:
                yield {name: signs * value}
                break
    new = [at for at in range(1, len(ids) - 1) if ids[at] not in ids[:at]]
    if new:
        at = new[len(new) // 2]
        spare = [
            next((t for t in order if t not in ids), ids[at]) for order in (range(ids[at]), range(ids[at], vocabulary))
        ]
        yield {"stop_token_ids": (spare[0], ids[at])}
        yield {"stop_token_ids": (ids[at], spare[1]), "max_new_tokens": at + 1}
        yield {"stop_token_ids": (ids[at],), "min_new_tokens": min(at + 2, MAX_TOKENS)}
        if at > 2:
            yield {"stop_token_ids": (ids[at],), "min_new_tokens": at - 1}
    yield {"stop_token_ids": (ids[0],), "min_new_tokens": 4}
    for size in (3, 1):
        texts = [plain.decode(ids[at : at + size]) for at in range(len(ids) // 2, len(ids) - size)]
        texts = [each for each in texts if each.strip() and each.isprintable() and each in plain.decode(ids)]
        if texts:
            yield {"stop": (ABSENT, texts[0])}


async def _check_batch(
    server: ConnectedServer, tally: Tally, prompt: TokenIds, answer: TokenResponse, number: int
) -> None:
    """Send everything that follows from a plain answer at once, half of it streamed."""
    plain, random = Plain.of(server, answer), np.random.default_rng([server.target.seed, number])
    singles = list(alone(plain, random, server.policy.info.vocab_size or len(server.policy.tokenizer)))
    is_sure = float(np.min(plain.draw.logprobs)) > math.log(2 * NUCLEUS["top_p"])
    truncations = (*LIKE_GREEDY, NUCLEUS) if is_sure else LIKE_GREEDY
    couples = [{**a, **b} for a, b in itertools.combinations([*singles, *truncations], 2) if not a.keys() & b.keys()]
    pairs = [couples[at] for at in random.permutation(len(couples))[:PAIRS]]
    cases = [{**GREEDY, **each} for each in ({}, *singles, *truncations, *pairs)]
    endless = {**GREEDY, "ignore_eos": True, "stop_token_ids": ()}  # the prompt repeats the end of a turn, too
    free = [{"temperature": 1.0, "ignore_eos": True}, *({**endless, "repetition_penalty": each} for each in REPETITION)]
    kinds, numbers = Counter[tuple[str, ...]](), list[int]()
    for each in (*cases, *free):  # what is whole after one prompt is streamed after the next
        numbers.append(number + kinds[tuple(each)])
        kinds[tuple(each)] += 1
    asked = zip([*cases, *free], numbers, strict=True)
    found = await together(_one(server, tally, prompt, each, order) for each, order in asked)
    for sampling, order, other in zip(cases, numbers, found, strict=False):
        if other is not None:
            place = Where(sampling=sampling, streamed=_streams(server, order), request_id=other.request_id)
            _require_expected(tally, plain, sampling, other, place)
            server.recorder.compared("ids", "plain answer", other.request_id)
            server.recorder.compared("end", "plain answer", other.request_id)
    on, *repetitive = found[len(cases) :]
    if on is not None:
        count = len(on.output_ids)
        tally.require("obeyed", count == MAX_TOKENS, f"ignore_eos: the answer has {count} tokens, not {MAX_TOKENS}.")
    often, seldom = (
        None if each is None else [len(set(each.output_ids.tolist())), len(each.output_ids)] for each in repetitive
    )
    if often is not None and seldom is not None:
        problem = (
            f"under repetition_penalty {REPETITION[0]} the answer has {often[0]} different tokens of {often[1]}, under "
            f"{REPETITION[1]} {seldom[0]} of {seldom[1]}: the first should make tokens come again."
        )
        ended = min(often[1], seldom[1]) < MAX_TOKENS  # some servers end at stop ids in spite of ignore_eos
        tally.require("obeyed", ended or often[0] / often[1] < seldom[0] / seldom[1], problem)


def _streams(server: ConnectedServer, number: int) -> bool:
    return number % 2 == 1 and can_stream(server.backend)


async def _one(
    server: ConnectedServer, tally: Tally, prompt: TokenIds, sampling: Mapping[str, Any], number: int, **how: bool
) -> TokenResponse | None:
    """Return an answer, streamed for odd numbers; None if the server refuses the parameters."""
    return await ask_if_accepted(server, tally, "obeyed", prompt, sampling, streamed=_streams(server, number), **how)


def _require_expected(
    tally: Tally, plain: Plain, sampling: Mapping[str, Any], answer: TokenResponse, place: Where, when: str = ""
) -> None:
    """Require that an answer is what follows from the plain one; `when` begins the sentence of a finding."""
    expected, ids = plain.expected(sampling), answer.output_ids.tolist()
    count = len(expected.ids)
    pairs = itertools.zip_longest(expected.ids, ids[:count])
    wrong = [(at, want, got) for at, (want, got) in enumerate(pairs) if want != got]
    if wrong and (at := wrong[0][0]) < len(ids):
        listed = plain.draw.top_ids.shape[1]  # without likely tokens only the answers' own logprobs show a near-tie
        apart = abs(float(plain.draw.logprobs[at] - answer.logprobs[at]))
        if at in expected.ties if listed else apart <= plain.near:
            tally.notes.append(f"Near-tie: {place}: token {at} is {ids[at]} in place of {expected.ids[at]}.")
            return
    problem = (
        f"{when}the answer should begin with {expected.ids[-6:]} up to token {count - 1}, by the likeliest tokens of "
        f"the plain answer; it differs at {offsets([at for at, *_ in wrong], count)}: {wrong[:3]} as (offset, own, "
        "found)."
    )
    where = Where(position=wrong[0][0], differences=tuple(wrong)).within(place) if wrong else place
    tally.require("obeyed", not wrong, problem, 1, where)
    if expected.finish is None:
        return
    problem = (
        f"{when}the answer should end by {expected.finish} after {count} tokens, but has {len(ids)} ({answer.finish})."
    )
    tally.require("obeyed", len(ids) == count, problem, 1, place)
    tally.require("finish", answer.finish == expected.finish, problem, 1, place)


def _same_tokens(one: TokenResponse, other: TokenResponse) -> int:
    """Return how many tokens two answers begin with in common."""
    length = min(len(one.output_ids), len(other.output_ids))
    return int(np.argmin([*(one.output_ids[:length] == other.output_ids[:length]), False]))


def _require_same_logprobs(
    server: ConnectedServer, tally: Tally, check: str, one: TokenResponse, other: TokenResponse, when: str
) -> None:
    """Require that the tokens with which two answers to equal requests begin have equal logprobs."""
    same, near = _same_tokens(one, other), max(NEAR_TIE_NATS, 2 * server.tolerance_nats)
    drift = float(np.max(np.abs(one.logprobs[:same] - other.logprobs[:same]), initial=0.0))
    problem = f"{when}{same} tokens are equal, but their logprobs are {drift:.3g} nats apart."
    tally.require(check, drift <= near, problem, 1, Where(request_id=other.request_id))


async def _check_seeds(server: ConnectedServer, tally: Tally, prompt: TokenIds) -> None:
    """Ask twice with each seed: whole with all others, then streamed with all others in the reverse order."""
    plain = {"temperature": 1.0, "seed": SEEDS[1]}
    one, other = [await ask(server, prompt, plain) for _ in range(2)]
    if not server.target.seeds and not np.array_equal(one.output_ids, other.output_ids):
        tally.skip("seeded", "The server does not obey seeds; --seeds makes that an error.")
        return
    _require_same_logprobs(server, tally, "seeded", one, other, "two equal requests with a seed: ")
    streams = int(can_stream(server.backend))

    async def differing(cases: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
        whole = await together(_one(server, tally, prompt, each, 0) for each in cases)
        again = await together(_one(server, tally, prompt, each, streams) for each in cases[::-1])
        found = []
        for number, (first, second) in enumerate(zip(whole, again[::-1], strict=True)):
            if first is not None and second is not None:
                ids, others = first.output_ids.tolist(), second.output_ids.tolist()
                server.recorder.compared("ids", "equal request", first.request_id, second.request_id)
                if ids != others:
                    found.append((number, f"{ids} whole, {others} streamed" if streams else f"{ids}, then {others}"))
        return found

    base = {"temperature": 1.0, "max_new_tokens": SEEDED_TOKENS}
    cases = [{**base, **each, "seed": SEEDS[number % len(SEEDS)]} for number, each in enumerate(SEEDED)]
    suspects = await differing(cases)
    for number, values in suspects:
        heat = cases[number].get("temperature", 1.0)
        more = [{**cases[number], "temperature": round(heat + 0.113 * each, 3)} for each in range(1, TRIES + 1)]
        wrong = len(await differing(more))
        problem = f"the same seed gave different answers, in {wrong + 1} of {TRIES + 1} pairs of requests: {values}."
        tally.require("seeded", wrong < TRIES, problem, 1, Where(sampling=cases[number]))
    tally.require("seeded", True, "", len(cases) - len(suspects))


async def _check_state(server: ConnectedServer, tally: Tally, prompt: TokenIds, plain: TokenResponse) -> None:
    """Ask right after an extreme request: nothing of its parameters may be left."""
    first = int(plain.output_ids[0])
    extreme: dict[str, Any] = {
        **{"temperature": 0.113, "top_k": 1, "top_p": 0.013, "min_p": 1.0, "seed": SEEDS[1], "max_new_tokens": 3},
        **{"presence_penalty": 1.987, "frequency_penalty": 1.987, "repetition_penalty": 1.887, "stop": (ABSENT, "e")},
        "extra": {"logit_bias": {str(first): -50.013}},
    }
    free: list[TokenResponse] = []
    for number, sampling in enumerate((GREEDY, {"temperature": 1.0}, {"temperature": 1.0})):
        if await _one(server, tally, prompt, extreme, number) is None:
            if "extra" not in extreme:
                return
            del extreme["extra"], extreme["stop"]
        answer = await ask(server, prompt if number == 0 else server.prompt_of(QUESTIONS[0]), sampling)
        if number == 0:
            place = Where(sampling=GREEDY, streamed=False, request_id=answer.request_id)
            _require_expected(tally, Plain.of(server, plain), GREEDY, answer, place, f"right after {extreme}, ")
            _require_same_logprobs(server, tally, "obeyed", plain, answer, f"right after {extreme}, ")
        else:
            free.append(answer)
    set_place(sampling={"temperature": 1.0})
    one, other = free
    same = _same_tokens(one, other)
    # That the first k tokens agree by chance has their probability; the number of lengths raises the bar.
    chance = float(np.minimum(one.logprobs[:same], 0).sum()) + math.log(MAX_TOKENS)
    problem = (
        f"two answers at temperature 1, each right after {extreme}, begin with the same {same} tokens, by chance "
        f"once in {math.exp(min(-chance, 700.0)):.3g} runs: something of that request is left, or all answers "
        "without a seed have one."
    )
    tally.require("sampler", chance > math.log(FALSE_ALARM), problem, 0)
