"""gpt-oss's tokenizer and template on a real engine: channels, a call, its result and the next answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from strands import Agent
from strands.types.exceptions import MaxTokensReachedException

import tito_engines as engines
from strands_tito.inspect.verify import rescore
from support import gptoss
from support.gptoss import ANSWER, ARGUMENTS, BEFORE_ANSWER, BEFORE_CALL, CALL, END, QUESTION, RETURN, THANKS, WELCOME
from support.keeping import ENGINES
from support.multiplying import multiply
from support.real import Served
from tito_core import Policy, TITOModel
from tito_core.hooks import LoopLimiter, LoopLimitReachedError
from tito_core.ledger import Provenance, VocabularyCheck, check_ledger
from tito_engines import install
from tito_engines.spec import find

pytestmark = [pytest.mark.engine, pytest.mark.long]
ROLLOUTS = 8


@dataclass(frozen=True)
class Played:
    """A conversation of two questions, with its agent and model."""

    served: Served
    agent: Agent
    model: TITOModel

    def sampled(self, turn: int) -> str:
        return self.decoded(self.model.ledger[turn].draft.output_ids)

    @staticmethod
    def decoded(ids: Any) -> str:
        return str(gptoss.tokenizer().decode(np.asarray(ids).tolist(), skip_special_tokens=False))


def token(text: str) -> int:
    return int(gptoss.tokenizer().convert_tokens_to_ids(text))


@pytest.fixture(scope="module", params=ENGINES)
def played(request: pytest.FixtureRequest) -> Iterator[Played]:
    kind = request.param
    folder = gptoss.model_folder(install.ensure(find(kind)).python)
    with engines.running_sync(kind, model=folder) as url:
        policy = Policy.connect(backend=kind, base_url=url, tokenizer=str(folder), timeout_s=120)
        model = policy.model(sampling={"max_new_tokens": 96, "temperature": 0.0})
        agent = Agent(model=model, tools=[multiply], callback_handler=None)
        agent(QUESTION)
        agent(THANKS)
        yield Played(Served(kind, url, policy), agent, model)


def test_the_vocabulary_is_the_servers(played: Played) -> None:
    assert played.served.policy.vocabulary is VocabularyCheck.TOKENIZE
    assert played.served.policy.detected.name == "gpt_oss"


def test_a_call_and_a_final_answer_end_a_turn_and_the_end_of_the_analysis_does_not(played: Played) -> None:
    stops = set(played.served.policy.stop_token_ids)
    assert {token(CALL), token(RETURN)} <= stops
    assert token(END) not in stops
    for turn in played.model.ledger:
        assert token(END) not in turn.draft.sampling["stop_token_ids"], "not a stop token of the request"


def test_the_policy_samples_reasoning_a_call_and_the_answer(played: Played) -> None:
    assert [played.sampled(turn) for turn in range(len(played.model.ledger))] == [
        gptoss.answer(2),
        gptoss.answer(4),
        gptoss.answer(6),
    ]
    assert [turn.draft.stop for turn in played.model.ledger] == [token(CALL), token(RETURN), token(RETURN)]


def test_reasoning_and_call_are_parsed_and_the_tool_runs(played: Played) -> None:
    question, calling, result, answer, thanks, welcome = played.agent.messages
    thought, call = calling["content"]
    assert thought["reasoningContent"]["reasoningText"]["text"] == BEFORE_CALL
    assert (call["toolUse"]["name"], call["toolUse"]["input"]) == ("multiply", ARGUMENTS)
    assert result["content"][0]["toolResult"]["content"] == [{"text": gptoss.RESULT}]
    thought, text = answer["content"]
    assert thought["reasoningContent"]["reasoningText"]["text"] == BEFORE_ANSWER
    assert text == {"text": ANSWER}
    assert welcome["content"] == [{"text": WELCOME}]
    assert [call.status for turn in played.model.ledger for call in turn.draft.calls] == ["ok"]
    assert (question["role"], thanks["role"]) == ("user", "user")


def test_each_turn_extends_the_one_before_token_for_token(played: Played) -> None:
    ledger = played.model.ledger
    check_ledger(ledger)
    assert [turn.parent for turn in ledger] == [None, 0, 1]
    assert len(ledger.trajectories()) == 1
    ids = played.model.trajectory.token_ids.tolist()
    assert ids == [token for text, _ in gptoss.pieces() for token in gptoss.encoded(text)]


def test_the_ledger_is_what_transformers_renders(played: Played) -> None:
    """Equal up to the call's result. After an answer the template drops reasoning and writes another closer."""
    ledger, rendered = played.model.ledger, gptoss.rendered
    prompts = [ledger.path_ids(turn.index)[: turn.draft.prompt_length].tolist() for turn in ledger]
    assert prompts[0] == gptoss.encoded(rendered(1))
    assert prompts[1] == gptoss.encoded(rendered(3))
    whole = played.decoded(ledger.path_ids(1))
    assert whole == rendered(3) + gptoss.answer(4)
    last = played.decoded(prompts[2])
    assert last.startswith(whole)
    delta = last.removeprefix(whole)
    assert rendered(5).endswith(f"{ANSWER}{END}{delta}"), "the end that was sampled stays, and is not doubled"
    kept = last.replace(f"{ANSWER}{RETURN}", f"{ANSWER}{END}")
    for thought in (BEFORE_CALL, BEFORE_ANSWER):
        kept = kept.replace(f"<|channel|>analysis<|message|>{thought}{END}<|start|>assistant", "")
    assert kept == rendered(5)


def test_only_sampled_tokens_are_trained_and_re_scoring_confirms_them(played: Played) -> None:
    t = played.model.trajectory
    sampled = [i for text, is_answer in gptoss.pieces() for i in [is_answer] * len(gptoss.encoded(text))]
    assert t.loss_mask.tolist() == [int(each) for each in sampled]
    assert not np.any(t.provenance == Provenance.INSERTED)
    found = played.served.policy.backend
    differences = np.array(_rescored(played, found))
    assert len(differences) == sum(sampled)
    assert np.max(differences) <= 1e-3


def _rescored(played: Played, backend: Any) -> Any:
    return asyncio.run(rescore(played.model.ledger, backend)).differences


def test_free_samples_have_a_status_and_re_scoring_confirms_them(played: Played) -> None:
    """At temperature 1 most calls are damaged, since a tiny model leaves much to the other 200,000 tokens."""
    policy, statuses, compared = played.served.policy, Counter[str](), 0
    for temperature in (0.4,) * ROLLOUTS + (1.0,) * ROLLOUTS:
        model = policy.model(sampling={"max_new_tokens": 96, "temperature": temperature})
        agent = Agent(model=model, tools=[multiply], callback_handler=None, hooks=[LoopLimiter(max_tool_iters=2)])
        with suppress(LoopLimitReachedError, MaxTokensReachedException):
            agent(QUESTION)
        check_ledger(model.ledger)
        for turn in model.ledger:
            found = [call.status for call in turn.draft.calls]
            statuses.update(f"{status} at {temperature}" for status in found)
            sampled = played.decoded(turn.draft.output_ids)
            assert found or "to=functions." not in sampled, sampled
        ran = [block for message in agent.messages for block in message["content"] if "toolResult" in block]
        sound = [block for block in ran if block["toolResult"]["status"] == "success"]
        assert len(sound) <= sum(call.status == "ok" for turn in model.ledger for call in turn.draft.calls)
        rescored = asyncio.run(rescore(model.ledger, policy.backend))
        compared += len(rescored.differences)
        assert rescored.not_comparable or rescored.quantile(0.99) <= 1e-2
    print(f"gpt_oss on {policy.info.backend}: {dict(statuses)}, {compared} tokens re-scored")
    assert statuses["ok at 0.4"] >= ROLLOUTS / 2
    assert compared > ROLLOUTS
