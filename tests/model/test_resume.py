"""Turns that the engine aborts: resumed as one turn, an error, or a truncated turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from strands import Agent
from strands.types.exceptions import MaxTokensReachedException

from support.aborting import Aborting
from support.histories import add
from support.scripted import BACKENDS, END, Says, backend_of, call, engine_of, ids_of, model_of, policy_of, tokenizer
from tito_conformance.testing import Completion
from tito_core import store
from tito_core.backend import EngineTimeoutError
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
