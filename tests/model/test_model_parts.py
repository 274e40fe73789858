"""`TITOModel`: each argument reaches the part that it configures, and each property returns that part's value."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from support.conversations import LOOK, user
from support.scripted import Says, call, model_of, policy_of
from tito_core import Policy, TITOModel
from tito_core.backend import EngineInfo, SamplingParams
from tito_core.backend.values import InvalidValueError
from tito_core.ledger import Branch, Ledger, Reason
from tito_core.settings import Settings
from tito_core.turn import history as branches
from tito_core.turn.history import HistoryChangedError, _changed_parts, _excerpt, _what_changed, refuse


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


def test_the_configuration_follows_its_changes() -> None:
    model = model_of("vllm", Says("Yes."))
    assert (
        model.config
        == model.get_config()
        == Settings.of().at(model.policy.info).config(model.policy.info, model.policy.detected.name)
    )
    model.update_config(temperature=0.5, context_window_limit=100)
    assert model.get_config()["sampling"]["temperature"] == 0.5
    assert model.config["context_window_limit"] == 100
    assert model.certificate is model.policy.template.certificate


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


class Shape(BaseModel):
    n: int


def streaming(model: TITOModel, *texts: str) -> list[tuple[Any, Any]]:
    """Let a model stream these texts, and return the arguments of its calls."""
    calls: list[tuple[Any, Any]] = []

    async def stream(*positional: Any, **named: Any) -> Any:
        calls.append((positional, named))
        for text in texts:
            yield {"contentBlockDelta": {"delta": {"text": text}}}
        yield {"messageStop": {"stopReason": "end_turn"}}

    model.stream = stream  # type: ignore[method-assign]
    return calls


async def test_the_structured_output_is_the_last_event() -> None:
    model = model_of("vllm", Says("Yes."))
    calls = streaming(model, '{"n"', ": 5}")
    prompt: Any = [{"role": "user", "content": [{"text": "Well?"}]}]
    events = [event async for event in model.structured_output(Shape, prompt, "Be brief.", model_state={"a": 1})]
    assert calls == [((prompt, None, "Be brief."), {"structured_output_model": Shape, "model_state": {"a": 1}})]
    assert events == [
        {"contentBlockDelta": {"delta": {"text": '{"n"'}}},
        {"contentBlockDelta": {"delta": {"text": ": 5}"}}},
        {"messageStop": {"stopReason": "end_turn"}},
        {"output": Shape(n=5)},
    ]


def test_the_changed_parts_of_an_opening() -> None:
    old = {"system": "a", "tools": [], "template": "t"}
    assert _changed_parts(old, old) == ""
    assert _changed_parts(old, {**old, "system": "b", "tools": [1], "template": "u"}) == (
        "system prompt and tools and template"
    )


def test_a_messages_excerpt_in_an_error() -> None:
    def shown(*texts: str) -> str:
        return _excerpt({"role": "user", "content": [{"text": text} for text in texts]})

    assert shown("a", "b") == "'a b'"
    assert shown("x" * 60) == repr("x" * 60)
    assert shown("x" * 61) == repr("x" * 60 + "...")


def test_the_change_of_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = SimpleNamespace(last_turn=None)
    assert _what_changed(context, Branch(Reason.EDIT, 0)).startswith("the history ")
    assert _what_changed(context, Branch(Reason.OPENING, 0, detail="tools")).startswith("the tools ")
    gone = SimpleNamespace(at=1, before=["opening", {"role": "user", "content": [{"text": "a"}]}], now=["opening"])
    monkeypatch.setattr(branches, "_change", lambda _: gone)
    missing = _what_changed(context, Branch(Reason.REWIND, 0, 2))
    repeated = _what_changed(context, Branch(Reason.RETRY, 0, 2))
    assert missing != repeated
    assert all(text.startswith("message 2 (user) ") and text.endswith(": 'a'") for text in (missing, repeated))
    with pytest.raises(HistoryChangedError) as caught:
        refuse(context, Branch(Reason.REWIND, 0, 2))
    parts = ("Law 8", missing, "(rewind, from turn 0, at message 2)", "model.reset()", "history='fork'")
    assert [part for part in parts if part not in str(caught.value)] == []
    refuse(context, None)
    refuse(context, Branch(Reason.SEPARATE, 0))


def test_a_model_keeps_its_policy() -> None:
    """Its ledger records what the policy promises, such as that content is inert."""
    model = model_of("vllm", Says("Yes."))
    with pytest.raises(AttributeError, match="policy"):
        model.policy = policy_of("vllm")  # type: ignore[misc]


def test_a_ledgers_header_names_its_policy() -> None:
    policy = replace(policy_of("vllm"), info=EngineInfo("vllm", "m", 10, "1"))
    made = policy.ledger(group_id="g", task_id="t", user={"a": 1})
    header = made.header
    assert (header.group_id, header.task_id, dict(header.user or {})) == ("g", "t", {"a": 1})
    assert header.tokenizer == policy.tokenizer.name_or_path
    certificate = policy.template.certificate
    assert header.certificate is not None
    assert header.certificate["passed"] == len(certificate.passed)
    plain = policy.ledger().header
    assert (plain.group_id, plain.task_id, plain.user) == (None, None, {})
    assert policy.sampling(SamplingParams()).stop_token_ids == policy.stop_token_ids


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
