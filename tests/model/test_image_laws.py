"""Images and the laws that hold between turns: law 5, nothing of a lost turn remains, and law 13, parity."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent
from strands.session.file_session_manager import FileSessionManager
from strands.types.exceptions import MaxTokensReachedException

from support.losses import UUID
from support.scripted import BACKENDS, tokenizer
from support.seeing import NAME, PAD, seeing
from support.vision import VisionEngine, image, png, policy_of
from tito_conformance.testing import HashPolicy
from tito_conformance.testing.pictures import picture
from tito_core import store
from tito_core.backend.errors import BackendError, ServerError
from tito_core.chat.images import read_image
from tito_core.ledger import Ledger, check_ledger
from tito_core.store import LedgerFile
from tito_core.turn.recording import TurnNotStoredError

FIRST, SECOND = png(8, 8, 1), png(8, 8, 2)
BLOCKS = st.one_of(
    st.text(max_size=8).map(lambda text: {"text": text}),
    st.integers(0, 3).map(lambda seed: image(picture(seed, 64, 64))),
)


async def ask(agent: Agent, content: list[Any]) -> None:
    with contextlib.suppress(MaxTokensReachedException):
        await agent.invoke_async(content)


async def played(kind: str, rounds: list[list[Any]]) -> bytes:
    """Play a conversation on a scripted server; return its ledger without the engine's records."""
    qwen = tokenizer(NAME)
    script = HashPolicy(len(qwen), alphabet=range(1000, 2000), eos_ids=[qwen.eos_token_id])
    _, policy = seeing(kind, script)
    model = policy.model(ledger=Ledger(UUID), sampling={"max_new_tokens": 4, "temperature": 0.0})
    agent = Agent(model=model, callback_handler=None)
    for content in rounds:
        await ask(agent, content)
    assert [turn.parent for turn in model.ledger] == [None, *range(len(rounds) - 1)]
    check_ledger(model.ledger)
    assert len(model.ledger.media(len(model.ledger) - 1)) >= sum("image" in block for block in rounds[-1])
    return store.encode(model.ledger, engine=False)


@settings(max_examples=6)
@given(st.lists(st.lists(BLOCKS, min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_conversation_with_images_gives_byte_equal_ledgers_on_both_backends(rounds: list[list[Any]]) -> None:
    vllm, sglang = (asyncio.run(played(kind, rounds)) for kind in BACKENDS)
    assert vllm == sglang


def failed(raw: dict[str, Any]) -> dict[str, Any]:
    raise ServerError("down", backend="toy")


def malformed(raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, "logprobs": raw["logprobs"][1:]}


def cancelled(raw: dict[str, Any]) -> dict[str, Any]:
    raise asyncio.CancelledError


def full(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("why", [failed, malformed, cancelled, full])
async def test_a_lost_turn_leaves_no_image(why: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in memory nor in the file, and the next turn is that of a run that lost none."""
    records = []
    for loses in (True, False):
        engine = VisionEngine()
        with LedgerFile(tmp_path / f"{loses}.tito", "a") as file:
            policy = await policy_of(engine, store=file)
            model = policy.model()
            agent = Agent(model=model, callback_handler=None)
            await ask(agent, [image(FIRST)])
            if loses:
                before = store.encode(model.ledger), [store.encode(each) for each in store.read(file.path)]
                with monkeypatch.context() as broken:
                    if why is full:
                        broken.setattr(file, "turn", full)
                    else:
                        engine.change = why
                    with pytest.raises((BackendError, asyncio.CancelledError, TurnNotStoredError)):
                        await ask(agent, [image(SECOND), {"text": "?"}])
                agent.messages.pop()
                engine.change = dict
                assert (store.encode(model.ledger), [store.encode(each) for each in store.read(file.path)]) == before
                assert [each.data for each in model.ledger.images.values()] == [FIRST]
            await ask(agent, [image(SECOND)])
            check_ledger(model.ledger)
            drafts = [turn.draft for turn in model.ledger]
            records.append([(draft.columns.buffer, draft.media, draft.parent, draft.fingerprint) for draft in drafts])
            assert [store.encode(each) for each in store.read(file.path)] == [store.encode(model.ledger)]
    assert records[0] == records[1]


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_banned_placeholder_is_not_sampled_and_the_bias_is_in_the_semantics(kind: str) -> None:
    """As docs/images.md shows it. SGLang's logprobs are taken after the bias, vLLM's raw ones before it (law 11)."""
    qwen = tokenizer(NAME)
    script = HashPolicy(len(qwen), alphabet=[PAD, *range(1000, 1009)], eos_ids=[qwen.eos_token_id])
    engine, policy = seeing(kind, script)
    ban = {"extra": {"logit_bias": {str(policy.template.placeholder_id): -100}}}
    sampled = []
    for sampling in ({}, ban):
        model = policy.model(sampling={"max_new_tokens": 200, "ignore_eos": True, **sampling})
        await ask(Agent(model=model, callback_handler=None), [image(picture(1, 64, 64)), {"text": "What is this?"}])
        [turn] = model.ledger
        sampled.append((turn.draft.output_ids == PAD).any())
        assert turn.draft.engine.semantics.adjusted is (sampling is ban and kind == "sglang")
        assert [call.status for call in turn.draft.calls] == ["suspect"] * int((turn.draft.output_ids == PAD).sum())
    assert sampled == [True, False]
    body = engine.requests[-1].body
    assert body["sampling_params"]["logit_bias"] == {str(PAD): -100}


async def test_a_large_picture_that_the_server_shrinks_does_not_cut_the_answer() -> None:
    """896 x 896 pixels could be 1,024 tokens, and are 64; the context has 1,400."""
    qwen = tokenizer(NAME)
    script = HashPolicy(len(qwen), alphabet=range(1000, 2000), eos_ids=[qwen.eos_token_id])
    engine, policy = seeing("sglang", script)
    engine.state.max_model_len = 1400
    policy = replace(policy, info=replace(policy.info, max_model_len=1398))
    model = policy.model(sampling={"max_new_tokens": 500, "ignore_eos": True})
    await ask(Agent(model=model, callback_handler=None), [image(picture(1, 896, 896)), {"text": "What is this?"}])
    [turn] = model.ledger
    assert [span.length for span in turn.draft.media] == [64]
    assert (turn.draft.max_new_tokens, len(turn.draft.output_ids)) == (500, 500)
    assert engine.requests[-1].max_new_tokens == 500


async def test_a_session_with_pictures_is_resumed_from_strands_files(tmp_path: Path) -> None:
    """Strands writes the blocks as JSON, and the history finds its place in the ledger by the bytes that come back."""

    def resumed(policy: Any) -> Agent:
        sessions = FileSessionManager("session", storage_dir=str(tmp_path / "sessions"))
        return Agent(model=policy.model(), callback_handler=None, agent_id="a", session_manager=sessions)

    engine = VisionEngine()
    with LedgerFile(tmp_path / "a.tito", "a") as file:
        await ask(resumed(await policy_of(engine, store=file)), [image(FIRST), {"text": "What?"}])
    with LedgerFile(tmp_path / "a.tito", "a") as file:
        agent: Any = resumed(await policy_of(engine, store=file))
        assert len(agent.messages) == 2
        await ask(agent, [{"text": "And this?"}, image(SECOND)])
        ledger = agent.model.ledger
        assert [turn.parent for turn in ledger] == [None, 0]
        assert [each.data for each in ledger.images.values()] == [FIRST, SECOND]
        check_ledger(ledger)
    assert [each.data for each in engine.requests[-1].images.images] == [FIRST, SECOND]
    [stored] = store.read(tmp_path / "a.tito")
    assert store.encode(stored) == store.encode(ledger)


async def test_a_message_that_changes_while_its_picture_is_read_is_sent_as_the_ledger_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    qwen = tokenizer(NAME)
    _, policy = seeing("vllm", HashPolicy(len(qwen), alphabet=range(1000, 2000), eos_ids=[qwen.eos_token_id]))
    messages: Any = [{"role": "user", "content": [image(picture(77)), {"text": "before"}]}]

    def edits(content: Any) -> Any:
        messages[0]["content"][1]["text"] = "after"
        return read_image(content)

    monkeypatch.setattr("tito_core.turn.images.read_image", edits)
    model = policy.model(sampling={"max_new_tokens": 4})
    async for _ in model.stream(messages):
        pass
    assert messages[0]["content"][1] == {"text": "after"}
    assert "before" in qwen.decode(model.ledger[0].draft.prompt_ids)
