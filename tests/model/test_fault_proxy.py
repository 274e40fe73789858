"""Rollouts through a proxy that breaks a third of the traffic: no wrong turn, no hang, nothing left open.

TITO_ROLLOUTS is their number and TITO_SEED their seed; `make prove` raises the number.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from support.backends import TRIES, soon
from support.proxy import AT, KINDS, Proxy
from support.scripted import policy_of, tokenizer
from tito_conformance.testing import Completion, ScriptedRequest, ScriptedServer, scripted_server
from tito_core.backend import BackendError, create_backend
from tito_core.ledger.laws import check_ledger

ROLLOUTS = int(os.environ.get("TITO_ROLLOUTS", "60"))
SEED = int(os.environ.get("TITO_SEED", "1"))
TURNS, AT_ONCE, ATTEMPTS = 3, 64, 3
PATIENCE_S = 30.0 + ROLLOUTS / 5
SPOILED = 0.33


@dataclass
class Findings:
    """Errors and wrong turns of the rollouts."""

    errors: dict[str, int] = field(default_factory=dict)
    unfinished: int = 0
    wrong: list[str] = field(default_factory=list)


def answers(request: ScriptedRequest) -> Completion:
    """Return an answer that depends on the request, so that a swapped answer is noticed."""
    draw = random.Random(repr((request.request_id, len(request.prompt_ids))))
    ids = [draw.randrange(300, 40_000) for _ in range(draw.randrange(3, 40))]
    return Completion([*ids, tokenizer().eos_token_id])


def served(kind: Any) -> ScriptedServer:
    loaded = tokenizer()
    return scripted_server(kind, answers, vocab_size=len(loaded), eos_ids=[loaded.eos_token_id], latency=seconds)


def seconds(request: ScriptedRequest) -> float:
    """Return an answer's latency; one in thirty is so long that only an abort ends the request."""
    return 300.0 if random.Random(request.request_id).random() < 1 / 30 else 0.005


async def rollout(model: Any, number: int, findings: Findings) -> None:
    """Run a rollout. Turns that raise a `BackendError` are retried; some turns are cancelled."""
    draw = random.Random(SEED * 100_003 + number)
    messages: list[Any] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": [{"text": f"Question {turn} of rollout {number}?"}]})
        for _ in range(12):
            limit = draw.uniform(0.0, 0.03) if draw.random() < 0.1 else None
            before = len(model.ledger)
            try:
                async with asyncio.timeout(limit):
                    events = [event async for event in model.stream(messages)]
            except (BackendError, TimeoutError) as error:
                name = type(error).__name__
                findings.errors[name] = findings.errors.get(name, 0) + 1
                if len(model.ledger) != before:
                    findings.wrong.append(f"{number}: a failed turn was committed ({error!r})")
                continue
            text = "".join(event.get("contentBlockDelta", {}).get("delta", {}).get("text", "") for event in events)
            messages.append({"role": "assistant", "content": [{"text": text or "[blank text]"}]})
            break
        else:
            findings.unfinished += 1
            return


def compare(model: Any, server: ScriptedServer, findings: Findings) -> None:
    """Compare a ledger with the server's answers by request id."""
    ledger = model.ledger
    check_ledger(ledger)
    if len(ledger) > TURNS or any(turn.draft.branch for turn in ledger):
        findings.wrong.append(f"{ledger.uuid}: it branched, or has {len(ledger)} turns")
    responses = server.engine.responses  # type: ignore[attr-defined]
    for turn in ledger:
        answer = responses[turn.draft.engine.request_id]
        prompt = [*ledger.path_ids(turn.parent).tolist(), *turn.draft.prompt_ids.tolist()]
        same = answer.request.prompt_ids == tuple(prompt) and answer.output_ids == tuple(turn.draft.output_ids.tolist())
        if not same or not all(abs(a - b) < 1e-6 for a, b in zip(answer.logprobs, turn.draft.logprobs, strict=True)):
            findings.wrong.append(f"{ledger.uuid}: turn {turn.index} differs from the server's answer")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_nothing_is_wrong_hung_or_left_behind_whatever_breaks(kind: str) -> None:
    findings = Findings()
    with served(kind) as server:
        async with Proxy(server.port, SEED) as proxy:
            backend = create_backend(kind, proxy.url, timeout_s=2.0, patience_s=TRIES[ATTEMPTS], sleep=_shortly)
            await backend.connect()
            policy = replace(policy_of(kind), backend=backend)
            proxy.share = SPOILED
            models = [policy.model(sampling={"max_new_tokens": 64}) for _ in range(ROLLOUTS)]
            slots = asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> None:
                async with slots:
                    await rollout(models[number], number, findings)

            async with asyncio.timeout(PATIENCE_S):  # a hung task fails here
                await asyncio.gather(*map(one, range(ROLLOUTS)))
            server.engine.responses = {  # type: ignore[attr-defined]
                answer.request.request_id: answer for exchange in server.engine.exchanges for answer in exchange.answers
            }
            for model in models:
                compare(model, server, findings)
            assert await soon(lambda: server.engine.running == 0), "a request is left on the server"
            assert await soon(lambda: not ours()), "a task is left"
            await backend.aclose()
            assert await soon(lambda: proxy.connections == 0), "a connection is left"
    assert findings.wrong == []
    assert findings.unfinished == 0
    assert max(proxy.tries.values()) <= ATTEMPTS, "a retry storm"
    assert sum(len(model.ledger) for model in models) == ROLLOUTS * TURNS
    assert {"DamagedAnswerError"} <= findings.errors.keys()
    if ROLLOUTS >= 60:
        assert set(proxy.happened) >= {*AT, *KINDS}, "everything that can break did"
    print(f"{kind}: {ROLLOUTS} rollouts, {sum(proxy.happened.values())} faults, {findings.errors}")


async def _shortly(seconds: float) -> None:
    await asyncio.sleep(seconds / 20)


def ours() -> list[Any]:
    """Return the tasks of this loop except the test's and the proxy's."""
    names = ("Proxy._accept", "test_nothing_is_wrong")
    return [task for task in asyncio.all_tasks() if not any(name in repr(task.get_coro()) for name in names)]
