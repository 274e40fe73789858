"""Tiny models that write each format whose real tokenizer a package ships, sampled freely on a real engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from strands import Agent, tool
from strands.types.exceptions import MaxTokensReachedException

import tito_engines as engines
from strands_tito.inspect.verify import rescore
from support.keeping import ENGINES
from support.multiplying import ANSWER, QUESTION
from support.overfit import ARGUMENTS, Spoken, spoken
from tito_core import Policy, TITOModel
from tito_core.hooks import LoopLimiter, LoopLimitReachedError
from tito_core.ledger import check_ledger
from tito_engines import install
from tito_engines.spec import find

pytestmark = [pytest.mark.engine, pytest.mark.long]
ROLLOUTS = 12
CASES = [(kind, name) for kind in ENGINES for name in ("hermes", "qwen3_coder", "deepseek_v3", "llama3_json")]


@dataclass(frozen=True)
class Served:
    spoken: Spoken
    policy: Policy


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    kind, name = request.param
    folder = spoken()[name].folder(install.ensure(find(kind)).python)
    with engines.running_sync(kind, model=folder) as url:
        policy = Policy.connect(backend=kind, base_url=url, tokenizer=str(folder), timeout_s=120)
        yield Served(spoken()[name], policy)


def play(policy: Policy, temperature: float) -> tuple[TITOModel, list[dict[str, int]], str]:
    """Return the model, the tool's inputs and the answer of one rollout."""
    ran = []

    @tool
    def multiply(a: int, b: int) -> int:
        """Multiply.

        Args:
            a: One.
            b: Other.
        """
        ran.append({"a": a, "b": b})
        return a * b

    model = policy.model(sampling={"max_new_tokens": 64, "temperature": temperature})
    agent = Agent(model=model, tools=[multiply], callback_handler=None, hooks=[LoopLimiter(max_tool_iters=2)])
    try:
        return model, ran, str(agent(QUESTION))
    except (LoopLimitReachedError, MaxTokensReachedException) as error:
        return model, ran, type(error).__name__


def test_the_template_shows_the_format(served: Served) -> None:
    assert served.policy.detected.name == served.spoken.parser


def test_the_call_is_parsed_and_run_and_its_result_answered(served: Served) -> None:
    model, ran, answer = play(served.policy, 0.0)
    assert ran == [ARGUMENTS]
    assert answer.strip() == ANSWER
    sampled = [
        served.spoken.tokenizer.decode(turn.draft.output_ids.tolist(), skip_special_tokens=False)
        for turn in model.ledger
    ]
    assert sampled == [served.spoken.call, served.spoken.answer]
    assert [[call.status for call in turn.draft.calls] for turn in model.ledger] == [["ok"], []]
    check_ledger(model.ledger)


def test_free_samples_have_a_status_and_re_scoring_confirms_them(served: Served) -> None:
    """At temperature 1 most calls are damaged, since a tiny model leaves much to the other 150,000 tokens."""
    statuses: Counter[str] = Counter()
    compared = 0
    for temperature in (0.4,) * ROLLOUTS + (1.0,) * ROLLOUTS:
        model, ran, _ = play(served.policy, temperature)
        check_ledger(model.ledger)
        found = [call.status for turn in model.ledger for call in turn.draft.calls]
        statuses.update(f"{status} at {temperature}" for status in found)
        assert len(ran) <= found.count("ok")
        first = served.spoken.tokenizer.decode(model.ledger[0].draft.output_ids.tolist(), skip_special_tokens=False)
        assert found or "multiply" not in first.rpartition("</think>")[2], first
        rescored = asyncio.run(rescore(model.ledger, served.policy.backend))
        compared += len(rescored.differences)
        assert rescored.not_comparable or rescored.quantile(0.99) <= 1e-2
    print(f"{served.spoken.parser} on {served.policy.info.backend}: {dict(statuses)}, {compared} tokens re-scored")
    assert statuses["ok at 0.4"] >= ROLLOUTS / 2
    assert compared > ROLLOUTS
