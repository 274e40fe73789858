"""How often the prompt's echo is requested; law 4 holds either way."""

from __future__ import annotations

from typing import Any

import pytest

from support.scripted import BACKENDS, Says, model_of

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
