"""The cached text of prompts equals the ledger's ids, whatever branch a turn continues."""

from __future__ import annotations

import copy
import gc
import json
from typing import Any

import pytest

from support.scripted import BACKENDS, Says, model_of, with_parts
from tito_core.policy import KEPT_TEXTS, PromptCache

FIELD = {"vllm": "prompt", "sglang": "input_ids"}


async def ask(model: Any, messages: list[Any], text: str) -> None:
    messages.append({"role": "user", "content": [{"text": text}]})
    text = ""
    async for event in model.stream(copy.deepcopy(messages)):
        text += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
    messages.append({"role": "assistant", "content": [{"text": text}]})


@pytest.mark.parametrize("kind", BACKENDS)
async def test_each_body_holds_the_ids_of_its_path_also_on_branches(kind: str) -> None:
    script = Says("One.", "Two.", "Three.", "Four.", "Five.")
    model = model_of(kind, script)
    messages: list[Any] = []
    await ask(model, messages, "A?")
    begun = copy.deepcopy(messages)
    await ask(model, messages, "B?")
    await ask(model, begun, "C?")  # leaves the first answer again, whose text was taken over
    await ask(model, messages, "D?")
    await ask(model, begun, "E?")
    ledger = model.ledger
    assert [turn.parent for turn in ledger] == [None, 0, 0, 1, 2]
    for turn, request in zip(ledger, script.requests, strict=True):
        expected = [*ledger.path_ids(turn.parent).tolist(), *turn.draft.prompt_ids.tolist()]
        assert list(request.prompt_ids) == expected
        kept = model.policy.prompts.text(ledger, turn.index, turn.draft.output_ids[:0])
        assert json.loads(kept.body({"n": 1}, FIELD[kind]))[FIELD[kind]] == ledger.path_ids(turn.index).tolist()


async def test_no_more_is_kept_than_the_latest_paths_of_live_ledgers() -> None:
    model = model_of("vllm", Says(*["Yes."] * (KEPT_TEXTS + 9)))
    prompts = PromptCache()
    model = with_parts(model, prompts=prompts)  # other tests share a policy
    for number in range(KEPT_TEXTS + 8):
        await ask(model, [], f"Is {number} a number?")
    assert [len(kept) for kept in prompts._kept.values()] == [KEPT_TEXTS]
    model.reset()
    gc.collect()
    assert not prompts._kept


@pytest.mark.parametrize(("kind", "header"), [("vllm", "x-session-id"), ("sglang", "x-smg-routing-key")])
async def test_requests_carry_the_ledger_as_session_id(kind: str, header: str) -> None:
    script = Says("One.", "Two.", "Three.")
    model = model_of(kind, script)
    messages: list[Any] = []
    await ask(model, messages, "A?")
    await ask(model, messages, "B?")
    first = model.reset()
    await ask(model, [], "C?")
    session_ids = [request.headers[header] for request in script.requests]
    assert session_ids == [first.uuid, first.uuid, model.ledger.uuid]
