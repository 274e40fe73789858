"""`TITOModel`: each argument reaches the part that it configures, and each property returns that part's value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.conversations import LOOK, user
from support.scripted import Says, call, model_of, policy_of
from tito_core import Policy, TITOModel
from tito_core.backend.values import InvalidValueError
from tito_core.ledger import Ledger
from tito_core.settings import Settings
from tito_core.turn.branch import _changed_parts


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of `Policy.connect`, which returns an existing policy."""
    calls: list[dict[str, Any]] = []
    policy = policy_of("vllm")

    def connect(**arguments: Any) -> Policy:
        calls.append(arguments)
        return policy

    monkeypatch.setattr(Policy, "connect", connect)
    return calls


NEEDED: dict[str, Any] = {"backend": "vllm", "tokenizer": "t"}


def test_each_option_reaches_its_part(connected: list[dict[str, Any]]) -> None:
    choices: dict[str, Any] = {
        "sampling": {"temperature": 0.5},
        "context_window_limit": 50,
        "history": "error",
        "malformed_calls": "raise",
        "thinking": "as-template",
        "on_abort": "discard",
        "turn_timeout_s": 1.5,
        "max_total_tokens": 70,
        "stream": True,
        "optional_outputs": {"top_logprobs": 2},
        "verify_echo": "first",
    }
    shared: dict[str, Any] = {
        "base_url": ["http://a", "http://b"],
        "parser": "hermes",
        "tool_calls": "lenient",
        "template_arguments": {"a": 1},
        "content_tokens": "as-template",
        "store": "s",
        "timeout_s": 3.0,
    }
    ledger = Ledger()
    model = TITOModel(**NEEDED, **choices, **shared, ledger=ledger, model_id="m")
    assert connected == [{**NEEDED, **shared, "model_id": "m"}]
    assert model._settings == Settings.of(**choices).at(model.policy.info)
    assert model.ledger is ledger
    assert TITOModel.of(model.policy, ledger, **choices)._settings == model._settings
    assert TITOModel.of(model.policy, ledger).ledger is ledger
    assert model._supports_structured_output is True


async def test_tokens_are_counted_with_the_system_prompt_and_the_tools() -> None:
    model = model_of("vllm", Says("Yes."))
    history: Any = [{"role": "user", "content": [{"text": "Well?"}]}]
    tool: Any = {"name": "look", "description": "Look.", "inputSchema": {"json": {"type": "object"}}}
    template = model.policy.template
    whole = template.count_tokens(history, None, None)
    assert await model.count_tokens(history, []) == whole
    assert await model.count_tokens(history) == template.added_tokens(history) < whole
    assert await model.count_tokens(history, [tool], "Be brief.") == template.count_tokens(history, "Be brief.", [tool])
    blocks: Any = [{"text": "Be"}, {"text": "brief."}]
    assert await model.count_tokens(history, system_prompt_content=blocks) == template.count_tokens(
        history, "Be\nbrief.", None
    )


def test_the_changed_parts_of_an_opening() -> None:
    old = {"system": "a", "tools": [], "template": "t"}
    assert _changed_parts(old, old) == ""
    assert _changed_parts(old, {**old, "system": "b", "tools": [1], "template": "u"}) == (
        "system prompt and tools and template"
    )


def test_a_model_keeps_its_policy() -> None:
    """Its ledger records what the policy promises, such as that content is inert."""
    model = model_of("vllm", Says("Yes."))
    with pytest.raises(AttributeError, match="policy"):
        model.policy = policy_of("vllm")  # type: ignore[misc]


def test_values_of_another_type_and_unknown_options_are_named(connected: list[dict[str, Any]]) -> None:
    policy: Any = 5
    with pytest.raises(InvalidValueError, match="of type int"):
        TITOModel.of(policy)
    ledger: Any = "x"
    with pytest.raises(InvalidValueError, match="of type str"):
        TITOModel.of(policy_of("vllm"), ledger)
    for wrong, right in (("model_ids", "model_id"), ("ledgers", "ledger"), ("tokenizers", "tokenizer")):
        options: Any = {wrong: 1}
        with pytest.raises(InvalidValueError, match=f"'{wrong}'.*'{right}'"):
            TITOModel(**NEEDED, **options)
    assert connected == []


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("reports", [True, False])
async def test_settings_of_models_for_other_providers_code(runs: bool, reports: bool) -> None:
    """They may report ids in the event that ends a message, and may leave calls as text."""
    model = model_of("vllm", Says(call("look", '{"at": "x"}')))
    model._settings = replace(model._settings, reports_ids=reports, runs_calls=runs)
    events = [event async for event in model.stream([user("a")], [LOOK])]
    [stop] = [event["messageStop"] for event in events if "messageStop" in event]
    assert stop["stopReason"] == ("tool_use" if runs else "end_turn")
    draft = model.ledger[0].draft
    expected = {
        "prompt_token_ids": draft.prompt_ids.tolist(),
        "token_ids": draft.output_ids.tolist(),
        "logprobs": draft.logprobs.tolist(),
    }
    assert stop.get("additionalModelResponseFields") == (expected if reports else None)
