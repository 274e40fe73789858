"""`TITOModel` itself: each argument goes where it belongs, and what it gives is what its parts say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from strands.types.exceptions import StructuredOutputException

from support.drafts import make_draft
from support.scripted import Says, model_of, policy_of
from tito_core import Policy, TITOModel
from tito_core.backend import EngineInfo, OptionalOutputs, SamplingParams
from tito_core.ledger import Branch, Ledger, Reason
from tito_core.model import SeveralTrajectoriesError
from tito_core.settings import Settings
from tito_core.turn import branches
from tito_core.turn.branches import HistoryChangedError, _changed_parts, _excerpt, _what_changed, refuse


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `Policy.connect` is asked; it gives a policy that is there."""
    asked: list[dict[str, Any]] = []
    policy = policy_of("vllm")

    def connect(**given: Any) -> Policy:
        asked.append(given)
        return policy

    monkeypatch.setattr(Policy, "connect", connect)
    return asked


NEEDED: dict[str, Any] = {"backend": "vllm", "tokenizer": "t"}


def test_what_is_not_said_is_the_default(connected: list[dict[str, Any]]) -> None:
    model = TITOModel(**NEEDED)
    assert connected == [
        {
            **NEEDED,
            "base_url": "",
        }
    ]
    assert model._settings == Settings.of().at(model.policy.info)
    assert model._recording._untouched


def test_what_is_said_goes_where_it_belongs(connected: list[dict[str, Any]]) -> None:
    choices: dict[str, Any] = {
        "sampling": {"temperature": 0.5},
        "context_window_limit": 50,
        "history": "error",
        "malformed_calls": "raise",
        "thinking": "as-template",
        "on_abort": "discard",
        "max_resumes": 2,
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
    assert connected == [{**NEEDED, **shared, "model": "m"}]
    assert model._settings == Settings.of(**choices).at(model.policy.info)
    assert model.ledger is ledger
    assert TITOModel.of(model.policy, ledger, **choices)._settings == model._settings
    assert TITOModel.of(model.policy, ledger).ledger is ledger
    assert model._supports_structured_output is True


def test_a_bad_choice_is_told_before_anybody_is_asked(connected: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="history must be"):
        TITOModel(**NEEDED, history="x")  # type: ignore[arg-type]
    assert connected == []


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


def test_a_trajectory_is_the_only_one() -> None:
    model = model_of("vllm", Says("Yes."))
    with pytest.raises(SeveralTrajectoriesError) as caught:
        _ = model.trajectory
    assert str(caught.value) == "The ledger holds no turn yet: run the agent first."
    model.ledger.commit(make_draft(None, 0, [100], [200]))
    assert model.trajectory.token_ids.tolist() == [100, 200]
    model.ledger.commit(make_draft(None, 0, [101], [200], branch=Branch(Reason.SEPARATE)))
    with pytest.raises(SeveralTrajectoriesError) as caught:
        _ = model.trajectory
    assert str(caught.value) == (
        "The ledger holds 2 trajectories, since a history was edited, retried or shared. Use model.trajectories.\n"
        f"{model.ledger.tree()}"
    )
    assert model.parse_report.all.total == 0


async def test_tokens_are_counted_with_the_system_prompt_and_the_tools() -> None:
    model = model_of("vllm", Says("Yes."))
    asked: Any = [{"role": "user", "content": [{"text": "Well?"}]}]
    tool: Any = {"name": "look", "description": "Look.", "inputSchema": {"json": {"type": "object"}}}
    template = model.policy.template
    assert await model.count_tokens(asked, []) == template.count_tokens(asked, None, None)
    assert await model.count_tokens(asked) == template.added_tokens(asked) < template.count_tokens(asked, None, None)
    assert await model.count_tokens(asked, [tool], "Be brief.") == template.count_tokens(asked, "Be brief.", [tool])
    blocks: Any = [{"text": "Be"}, {"text": "brief."}]
    assert await model.count_tokens(asked, system_prompt_content=blocks) == template.count_tokens(
        asked, "Be\nbrief.", None
    )


class Shape(BaseModel):
    n: int


def streaming(model: TITOModel, *texts: str) -> list[tuple[Any, Any]]:
    """Let a model stream given texts; give what it is asked."""
    asked: list[tuple[Any, Any]] = []

    async def stream(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        for text in texts:
            yield {"contentBlockDelta": {"delta": {"text": text}}}
        yield {"messageStop": {"stopReason": "end_turn"}}

    model.stream = stream  # type: ignore[method-assign]
    return asked


async def test_a_structured_output_is_asked_for_and_comes_last() -> None:
    model = model_of("vllm", Says("Yes."))
    asked = streaming(model, '{"n"', ": 5}")
    prompt: Any = [{"role": "user", "content": [{"text": "Well?"}]}]
    events = [event async for event in model.structured_output(Shape, prompt, "Be brief.", model_state={"a": 1})]
    assert asked == [((prompt, None, "Be brief."), {"structured_output_model": Shape, "model_state": {"a": 1}})]
    assert events == [
        {"contentBlockDelta": {"delta": {"text": '{"n"'}}},
        {"contentBlockDelta": {"delta": {"text": ": 5}"}}},
        {"messageStop": {"stopReason": "end_turn"}},
        {"output": Shape(n=5)},
    ]


async def test_an_output_of_another_shape_is_told_with_its_beginning() -> None:
    model = model_of("vllm", Says("Yes."))
    streaming(model, '{"n": "', "x" * 300, '"}')
    with pytest.raises(StructuredOutputException) as caught:
        _ = [event async for event in model.structured_output(Shape, [])]
    beginning = '{"n": "' + "x" * 193
    assert str(caught.value) == (
        "The answer is not a valid Shape (Input should be a valid integer, unable to parse string as an integer): "
        f"raise max_new_tokens, or loosen the schema. It said {beginning!r}."
    )


def test_what_changed_of_an_opening() -> None:
    old = {"system": "a", "tools": [], "template": "t"}
    assert _changed_parts(old, old) == ""
    assert _changed_parts(old, {**old, "system": "b", "tools": [1], "template": "u"}) == (
        "system prompt and tools and template"
    )


def test_what_an_error_shows_of_a_message() -> None:
    def shown(*texts: str) -> str:
        return _excerpt({"role": "user", "content": [{"text": text} for text in texts]})

    assert shown("a", "b") == "'a b'"
    assert shown("x" * 60) == repr("x" * 60)
    assert shown("x" * 61) == repr("x" * 60 + "...")


def test_what_changed_of_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    situation: Any = SimpleNamespace(own=None)
    assert _what_changed(situation, Branch(Reason.EDIT, 0)) == "the history changed"
    assert _what_changed(situation, Branch(Reason.OPENING, 0, detail="tools")) == "the tools changed"
    gone = SimpleNamespace(at=1, before=["opening", {"role": "user", "content": [{"text": "a"}]}], now=["opening"])
    monkeypatch.setattr(branches, "_change", lambda _: gone)
    assert _what_changed(situation, Branch(Reason.REWIND, 0, 2)) == "message 2 (user) is gone: 'a'"
    assert _what_changed(situation, Branch(Reason.RETRY, 0, 2)) == "message 2 (user) is asked for again: 'a'"
    with pytest.raises(HistoryChangedError) as caught:
        refuse(situation, Branch(Reason.REWIND, 0, 2))
    assert str(caught.value) == (
        "Law 8: history='error', and message 2 (user) is gone: 'a' (rewind, from turn 0, at message 2). Make the "
        "change in a new rollout (model.reset()), or let it branch with history='fork'."
    )
    refuse(situation, None)
    refuse(situation, Branch(Reason.SEPARATE, 0))


def test_a_policy_gives_its_choices_to_the_model() -> None:
    policy = policy_of("vllm")
    ledger = Ledger()
    model = policy.model(
        ledger=ledger, stream=True, sampling=SamplingParams(seed=3), optional_outputs=OptionalOutputs(priority=1)
    )
    assert (model.policy, model.ledger) == (policy, ledger)
    expected = Settings.of(stream=True, sampling=SamplingParams(seed=3), optional_outputs=OptionalOutputs(priority=1))
    assert model._settings == expected.at(policy.info)


def test_a_ledger_says_whose_it_is() -> None:
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
