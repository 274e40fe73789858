"""Turns that the engine aborts, bounds of tokens, ids that a server refuses, and how often the prompt is echoed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent
from strands.types.exceptions import MaxTokensReachedException

from support.aborting import Aborting
from support.histories import add
from support.scripted import BACKENDS, END, Says, backend_of, call, engine_of, ids_of, model_of, policy_of, tokenizer
from tito_conformance.testing import Completion, Fault, at
from tito_core import TITOModel, TotalTokensReachedError, store
from tito_core.backend import BadRequestError, EngineTimeoutError, ProtocolViolationError
from tito_core.ledger import Finish, Provenance, check_ledger

SAID = "Let me add them. " + call("add", '{"a": 1, "b": 2}') + END


def later(first: Any, *then: Any, runs: int | None = None) -> Any:
    """Answers the first turn, which takes `runs` engine requests, by one script, and later turns by another."""
    rest, runs = Says(*then), runs or len(first.cuts) + 1

    def script(request: Any) -> Any:
        return rest(request) if len(first.requests) >= runs else first(request)

    return script


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_resumed_turn_is_one_turn(kind: str) -> None:
    whole = ids_of(SAID)
    plain = model_of(kind, Says(SAID.removesuffix(END), "It is 3."))
    cut = model_of(kind, later(Aborting(whole, [4, 5], versions=["a", "a", "b"]), "It is 3."))
    for model in (plain, cut):
        await Agent(model=model, tools=[add], callback_handler=None).invoke_async("What is 1 + 2?")
        check_ledger(model.ledger)
    turn = cut.ledger[0].draft
    assert len(cut.ledger) == len(plain.ledger) == 2
    for one, other in zip(cut.trajectory.segments, plain.trajectory.segments, strict=True):
        assert one == other
    assert cut.trajectory.token_ids.tolist() == plain.trajectory.token_ids.tolist()
    assert cut.trajectory.provenance.tolist() == plain.trajectory.provenance.tolist()
    assert turn.max_new_tokens == plain.ledger[0].draft.max_new_tokens
    assert turn.sampling == plain.ledger[0].draft.sampling
    assert [(span.start, span.stop) for span in turn.engine.responses] == [(0, 4), (4, 9), (9, len(whole))]
    assert [tuple(span) for span in turn.engine.versions] == [(0, 9, "a"), (9, len(whole), "b")]
    assert turn.engine.request_id == turn.engine.responses[-1].request_id
    assert turn.calls == plain.ledger[0].draft.calls
    assert cut.ledger[1].draft.engine.responses == ()
    loaded = store.from_json(store.to_json(cut.ledger))
    assert loaded[0].draft.engine.responses == turn.engine.responses
    assert store.to_json(cut.ledger)["turns"][0]["engine"]["responses"] == [list(s) for s in turn.engine.responses]


async def test_a_turn_records_what_the_server_had_cached() -> None:
    model = model_of("vllm", lambda request: Completion(ids_of(f"Yes.{END}"), cached_tokens=3))
    await Agent(model=model, callback_handler=None).invoke_async("Is it?")
    assert model.ledger[0].draft.engine.cached_tokens == 3


@pytest.mark.parametrize("emitted", [3, 12])
async def test_a_committed_part_is_a_turn_that_was_cut_off(emitted: int) -> None:
    whole = ids_of(SAID)
    model = model_of("sglang", later(Aborting(whole, [emitted]), "Two.", runs=1), on_abort="commit")
    agent = Agent(model=model, tools=[add], callback_handler=None)
    with pytest.raises(MaxTokensReachedException):
        await agent.invoke_async("What is 1 + 2?")
    await agent.invoke_async("Go on.")
    check_ledger(model.ledger)
    assert [turn.parent for turn in model.ledger] == [None, 0]
    part, following = (turn.draft for turn in model.ledger)
    assert part.finish is Finish.ABORT
    assert part.output_ids.tolist() == whole[:emitted]
    inserted = following.prompt_ids[following.prompt_provenance == Provenance.INSERTED].tolist()
    assert tokenizer().decode(inserted).endswith(END)
    loaded = store.from_json(store.to_json(model.ledger))
    assert loaded[0].draft.finish is Finish.ABORT


async def test_a_turns_timeout_includes_pauses() -> None:
    engine = engine_of("vllm", Says("One."))
    policy = policy_of("vllm")
    backend = backend_of(engine, "vllm")
    model = replace(policy, backend=backend).model(turn_timeout_s=0.2)
    engine.state.pause()
    agent = Agent(model=model, callback_handler=None)
    with pytest.raises(EngineTimeoutError, match=r"within turn_timeout_s=0\.2, .*aborted") as caught:
        await agent.invoke_async("Hello?")
    assert caught.value.backend == "vllm"
    assert caught.value.request_id == engine.requests[-1].request_id
    assert (len(model.ledger), engine.running) == (0, 0)
    engine.state.resume()
    await agent.invoke_async("Hello?")
    assert len(model.ledger) == 1


# `max_total_tokens`: no trajectory is longer, answers are cut off, and nothing is sent when none are left.


CALL = call("add", '{"a": 1, "b": 2}')


async def rollout(kind: str, bound: int | None, *answers: str) -> tuple[Any, list[BaseException]]:
    """Invoke an agent twice; return its model and the errors of its invocations."""
    model = model_of(kind, Says(*answers), max_total_tokens=bound)
    agent = Agent(model=model, tools=[add], callback_handler=None)
    ended: list[BaseException] = []
    for question in ("What is 1 + 2?", "And again?"):
        try:
            await agent.invoke_async(question)
        except MaxTokensReachedException as error:
            ended.append(error)
    check_ledger(model.ledger)
    return model, ended


def test_no_trajectory_is_longer_than_the_bound() -> None:
    free, ended = asyncio.run(rollout("sglang", None, CALL, CALL, "It is 3.", "Yes."))
    assert not ended
    whole = len(free.trajectory)

    @settings(deadline=None, max_examples=12)
    @given(st.integers(1, whole + 2))
    def holds(bound: int) -> None:
        model, ended = asyncio.run(rollout("sglang", bound, CALL, CALL, "It is 3.", "Yes."))
        assert all(len(trajectory) <= bound for trajectory in model.trajectories)
        assert bool(ended) == (bound < whole)
        for request in model.scripted.requests:
            assert len(request.prompt_ids) + request.max_new_tokens <= bound or request.ignore_eos
        for turn in model.ledger:
            if turn.path_length == bound < whole and turn.draft.finish == Finish.LENGTH:
                assert turn.draft.max_new_tokens == bound - turn.draft.prompt_length

    holds()


async def test_nothing_is_sent_when_no_token_is_left() -> None:
    model = model_of("vllm", Says("Hello."), max_total_tokens=5)
    agent = Agent(model=model, callback_handler=None)
    with pytest.raises(TotalTokensReachedError, match=r"\d+ tokens.* max_total_tokens=5 .*End the rollout"):
        await agent.invoke_async("Hello?")
    assert (len(model.ledger), len(model.scripted.requests)) == (0, 0)


# Ids that the server refuses in a prompt are not committed; ids of a padded embedding are (law 4).


PADDED = 64
"""Number of embedding rows past the tokenizer's ids."""


def samples(token: int) -> Callable[[Any], None]:
    """Replace the first id of an answer."""

    def edit(answer: Any) -> None:
        if "choices" in answer:
            choice = answer["choices"][0]
            choice["token_ids"][0] = token
            choice["logprobs"]["content"][0]["token_id"] = token
        else:
            answer["output_ids"][0] = token
            answer["meta_info"]["output_token_logprobs"][0][1] = token

    return edit


def model_on(kind: str, script: Any, vocab_size: int, **options: Any) -> TITOModel:
    """Make a model on an engine with this many embedding rows; only SGLang reports the number."""
    backend = backend_of(engine_of(kind, script, vocab_size=vocab_size, **options), kind)
    shared = policy_of(kind)
    info = replace(shared.info, vocab_size=vocab_size if kind == "sglang" else None, reports_versions=False)
    return replace(shared, backend=backend, info=info).model()


@pytest.mark.parametrize("kind", BACKENDS)
@given(token=st.integers(0, 2 * PADDED))
@settings(max_examples=8, deadline=None)
def test_ids_of_a_padded_embedding_are_committed_exactly_when_the_server_accepts_them(kind: str, token: int) -> None:
    size = len(tokenizer())
    answer = [size + token, *ids_of("One." + END)]
    fault = at({0: Fault(edit=samples(size + token))})
    model = model_on(kind, Says([0, *answer[1:]], "Two."), size + PADDED, fault=fault)
    agent = Agent(model=model, callback_handler=None)
    if token < PADDED:
        agent("Hello?")
        assert model.trajectory.token_ids[-len(answer) :].tolist() == answer
        agent("And?")
        assert len(model.trajectories) == 1
    else:
        with pytest.raises(ProtocolViolationError):
            agent("Hello?")
        assert len(model.ledger) == 0


def test_a_committed_id_that_another_server_refuses_names_the_remedy() -> None:
    size = len(tokenizer())
    answer = [size + 1, *ids_of("One." + END)]
    padded = model_on("vllm", Says(answer), size + PADDED)
    agent = Agent(model=padded, callback_handler=None)
    agent("Hello?")
    agent.model = TITOModel.of(model_on("vllm", Says("Two."), size).policy, padded.ledger)
    with pytest.raises(BadRequestError, match=r"del agent\.messages\[n:\]"):
        agent("And?")
    del agent.messages[:]
    agent("And now?")
    assert len(padded.ledger) == 2


# How often the prompt's echo is requested; law 4 holds either way.


ASKED = {"vllm": "return_token_ids", "sglang": "return_prompt_token_ids"}


async def talk(model: Any, messages: list[Any], *texts: str) -> None:
    for text in texts:
        messages.append({"role": "user", "content": [{"text": text}]})
        text = ""
        async for event in model.stream(messages):
            text += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
        messages.append({"role": "assistant", "content": [{"text": text}]})


@pytest.mark.parametrize(("often", "expected"), [("always", [True, True, True]), ("first", [True, False, False])])
@pytest.mark.parametrize("kind", BACKENDS)
async def test_the_echo_is_requested_as_often_as_set(kind: str, often: Any, expected: list[bool]) -> None:
    script = Says("One.", "Two.", "Three.")
    model = model_of(kind, script, verify_echo=often)
    await talk(model, [], "A?", "B?", "C?")
    assert [turn.parent for turn in model.ledger] == [None, 0, 1]
    assert [request.body[ASKED[kind]] for request in script.requests] == expected


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_new_path_is_echoed_again(kind: str) -> None:
    script = Says("One.", "Two.", "Three.")
    model = model_of(kind, script, verify_echo="first")
    await talk(model, [], "A?", "B?")
    await talk(model, [], "Another?")
    assert [turn.parent for turn in model.ledger] == [None, 0, None]
    assert [request.body[ASKED[kind]] for request in script.requests] == [True, False, True]
