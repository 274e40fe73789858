"""Rollouts of equal prompts through a proxy that mixes answers up: a turn holds what was sampled for its own request.

TITO_TURNS is the number of committed turns on each wire, streamed and not, and TITO_SEED the seed; `make prove` raises
the number.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from support.backends import Handler, Received, in_process
from support.scripted import engine_of, policy_of, tokenizer
from tito_conformance.testing import Completion, ScriptedEngine, ScriptedRequest
from tito_conformance.testing.wire import WireResponse
from tito_core.backend import BackendError
from tito_core.ledger.laws import check_ledger
from tito_sglang.backend import SGLangBackend
from tito_vllm.backend import VLLMBackend

TURNS = int(os.environ.get("TITO_TURNS", "100"))
SEED = int(os.environ.get("TITO_SEED", "1"))
AT_ONCE = 16
GENERATES = ("/generate", "/inference/v1/generate", "/v1/completions")
WIRES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("vllm", {}),
    "vllm-completions": ("vllm", {"scale_out": False}),
    "sglang": ("sglang", {}),
}


class ToxicProxy:
    """Between the client and a server. Half of the answers are spoiled, each in one way of `TOXICS`.

    Attributes:
        happened: How often each toxic changed an answer.
        answers: What the server sampled, by the request's id.
    """

    def __init__(self, engine: ScriptedEngine, seed: int) -> None:
        self.happened: Counter[str] = Counter()
        self.answers: dict[str, list[Any]] = {}
        self._engine = engine
        self._random = random.Random(seed)
        self._earlier: list[WireResponse] = []

    async def __call__(self, received: Received) -> WireResponse:
        response = await self._engine.handle(received.method, received.path, received.headers, received.content)
        if received.path not in GENERATES or response.status != 200:
            return response
        before, self._earlier = self._earlier, [*self._earlier[-9:], response]
        if self._random.random() < 0.5:
            return response
        for name in self._random.sample(sorted(TOXICS), len(TOXICS)):
            spoiled = TOXICS[name](response, before, self._random)
            if spoiled.content != response.content:
                self.happened[name] += 1
                return spoiled
        return response


def stale(response: WireResponse, before: list[WireResponse], draw: random.Random) -> WireResponse:
    """A cache, or a connection that is an answer behind."""
    return draw.choice(before) if before else response


def _of_events(
    change: Callable[[list[bytes], random.Random], list[bytes]],
) -> Callable[[WireResponse, list[WireResponse], random.Random], WireResponse]:
    def toxic(response: WireResponse, before: list[WireResponse], draw: random.Random) -> WireResponse:
        events = response.content.split(b"\n\n")[:-1]
        if not response.content.startswith(b"data:") or len(events) < 3:
            return response
        return replace(response, body=b"\n\n".join(change(events, draw)) + b"\n\n")

    return toxic


def _swapped(events: list[bytes], draw: random.Random) -> list[bytes]:
    one, other = draw.sample(range(len(events)), 2)
    events[one], events[other] = events[other], events[one]
    return events


def _lost(events: list[bytes], draw: random.Random) -> list[bytes]:
    del events[draw.randrange(len(events))]
    return events


def _doubled(events: list[bytes], draw: random.Random) -> list[bytes]:
    at = draw.randrange(len(events))
    return [*events[: at + 1], *events[at:]]


def mixed(response: WireResponse, before: list[WireResponse], draw: random.Random) -> WireResponse:
    """The beginning of one stream and the rest of another."""
    other = draw.choice(before).content if before else b""
    if not (other.startswith(b"data:") and response.content.startswith(b"data:")):
        return response
    one, two = response.content.split(b"\n\n"), other.split(b"\n\n")
    cut = draw.randrange(1, min(len(one), len(two)))
    return replace(response, body=b"\n\n".join([*one[:cut], *two[cut:]]))


def half(response: WireResponse, before: list[WireResponse], draw: random.Random) -> WireResponse:
    """A cut body whose length is right again."""
    content = response.content
    return replace(response, body=content[: draw.randrange(1, len(content))])


TOXICS: dict[str, Any] = {
    "stale": stale,
    "swapped": _of_events(_swapped),
    "lost": _of_events(_lost),
    "doubled": _of_events(_doubled),
    "mixed": mixed,
    "half": half,
}


class Samples:
    """Answers each request by tokens of its own, though all prompts are equal, and keeps them."""

    def __init__(self) -> None:
        self.by_id: dict[str, tuple[list[int], list[float]]] = {}

    def __call__(self, request: ScriptedRequest) -> Completion:
        draw = random.Random(request.request_id)
        ids = [*(draw.randrange(300, 20_000) for _ in range(draw.randrange(2, 9))), tokenizer().eos_token_id]
        logprobs = [-draw.randrange(1, 500) / 128 for _ in ids]
        self.by_id[request.request_id] = ids, logprobs
        return Completion(ids, logprobs)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_every_turn_was_sampled_for_its_own_request(wire: str, stream: bool) -> None:
    kind, options = WIRES[wire]
    sampled, refused = Samples(), Counter[str]()
    engine = engine_of(kind, sampled, record=False, **options)
    proxy = ToxicProxy(engine, SEED)
    cls = VLLMBackend if kind == "vllm" else SGLangBackend
    backend = cls("http://scripted", http_transport=in_process(Handler(proxy)), patience_s=0)
    sound = policy_of(kind)
    info = sound.info if options == {} else replace(sound.info, reports_versions=False)  # completions have none
    policy = replace(sound, backend=backend, info=info)
    await backend.connect()
    turns: list[Any] = []

    async def rollouts() -> None:
        while len(turns) < TURNS:
            model = policy.model(stream=stream, sampling={"max_new_tokens": 16})
            try:
                async for _ in model.stream([{"role": "user", "content": [{"text": "The same question"}]}]):
                    pass
            except BackendError as error:
                refused[type(error).__name__] += 1
                if refused.total() > 100 * TURNS:
                    raise
                assert len(model.ledger) == 0
                continue
            check_ledger(model.ledger)
            turns.append(model.ledger[0].draft)

    await asyncio.gather(*(rollouts() for _ in range(AT_ONCE)))
    unshown = [draft for draft in turns if draft.engine.unordered]
    for draft in turns:
        assert sampled.by_id[draft.engine.request_id] == (draft.output_ids.tolist(), draft.logprobs.tolist())
    assert len({draft.engine.request_id for draft in turns}) == len(turns)
    assert not unshown, "both servers count the tokens of each event"
    assert proxy.happened["stale"] > 0
    assert refused["ProtocolViolationError"] > 0
    if TURNS >= 100 and stream:
        assert min(proxy.happened[name] for name in TOXICS) > 0, proxy.happened
    print(f"{wire} {stream=}: {len(turns)} turns, {sum(proxy.happened.values())} toxics, refused {dict(refused)}")
