"""The names of strands-vllm over a scripted vLLM server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel
from strands import Agent, tool
from strands.handlers.callback_handler import CompositeCallbackHandler
from strands.hooks import BeforeToolCallEvent, HookRegistry

import tito_vllm
from support.histories import add
from support.names import named
from support.scripted import Says, call, ids_of, tokenizer
from tito_core.backend.errors import EngineConnectionError
from tito_core.chat.tokenizer import TokenizerError
from tito_core.ledger import check_ledger
from tito_vllm import TokenManager, VLLMModel, VLLMTokenRecorder, VLLMToolValidationHooks, make_vllm_openai_model

CALL = call("add", '{"a": 2, "b": 3}')
URL = "http://localhost:8000/v1"


def recorded(script: Says, **options: Any) -> tuple[Any, VLLMTokenRecorder, Agent]:
    model = named("vllm", script, return_token_ids=True, **options)
    recorder = VLLMTokenRecorder()
    return model, recorder, Agent(model=model, tools=[add], callback_handler=recorder)


def test_every_name_can_be_imported() -> None:
    for name in tito_vllm.__all__:
        assert getattr(tito_vllm, name) is not None
    assert set(tito_vllm.__all__) <= set(dir(tito_vllm))
    with pytest.raises(AttributeError, match="has no attribute 'VLLMModle'"):
        _ = tito_vllm.VLLMModle


async def test_each_recorded_prompt_extends_the_one_before_and_is_what_was_sent() -> None:
    script = Says(CALL, CALL, "It is 5.")
    model, recorder, agent = recorded(script)
    await agent.invoke_async("2 + 3?")
    assert len(recorder.history) == 3
    before: list[int] = []
    for turn, sent in zip(recorder.history, script.requests, strict=True):
        assert turn["prompt_token_ids"] == list(sent.prompt_ids)
        assert turn["prompt_token_ids"][: len(before)] == before
        before = turn["prompt_token_ids"] + (turn["token_ids"] or [])
        assert len(turn["logprobs"] or []) == len(turn["token_ids"] or [])
    assert before == model.trajectory.token_ids.tolist()
    assert recorder.token_ids == ids_of("It is 5.<|im_end|>")
    recorder.reset()
    assert (recorder.prompt_token_ids, recorder.token_ids, recorder.history) == (None, None, [])


async def test_the_old_recipe_for_a_trainer_gets_the_real_context_once() -> None:
    """strands-vllm's recipe adds each whole prompt, which made 616 tokens of a context of 227."""
    model, recorder, agent = recorded(Says(CALL, CALL, "It is 5."))
    await agent.invoke_async("2 + 3?")
    tm = TokenManager()
    for entry in recorder.history:
        tm.add_prompt(entry["prompt_token_ids"] or [])
        tm.add_response(entry["token_ids"] or [], entry["logprobs"])
    assert tm.model_dump() == model.token_manager.model_dump()
    assert tm.loss_mask == model.trajectory.loss_mask.tolist()


async def test_without_return_token_ids_events_hold_no_ids() -> None:
    model = named("vllm", Says("Hi."))
    recorder = VLLMTokenRecorder()
    await Agent(model=model, callback_handler=recorder).invoke_async("Hello?")
    assert recorder.history == []
    assert model.rollout.token_ids[-3:] == ids_of("Hi.<|im_end|>")[-3:]


async def test_an_inner_handler_gets_every_event_and_other_events_are_ignored() -> None:
    events: list[Any] = []
    recorder = VLLMTokenRecorder(lambda **event: events.append(event), add_to_span=False)
    model = named("vllm", Says("Hi."), return_token_ids=True)
    await Agent(model=model, callback_handler=CompositeCallbackHandler(recorder)).invoke_async("Hello?")
    assert len(recorder.history) == 1
    assert sum("messageStop" in event.get("event", {}) for event in events) == 1
    for event in ({}, {"event": 3}, {"event": {"messageStop": {"stopReason": "end_turn"}}}, {"data": "x"}):
        recorder(**event)
    assert len(recorder.history) == 1


def test_the_span_gets_what_agent_lightning_reads() -> None:
    tracer = TracerProvider().get_tracer("test")
    fields = {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5]}
    event = {"messageStop": {"stopReason": "end_turn", "additionalModelResponseFields": fields}}
    attributes: list[dict[str, Any]] = []
    for adds in (True, False):
        with tracer.start_as_current_span("turn") as span:
            VLLMTokenRecorder(add_to_span=adds)(event=event)
        attributes.append(dict(span.attributes))  # type: ignore[attr-defined]
    assert attributes == [
        {
            "llm.token_count.prompt": 3,
            "llm.hosted_vllm.prompt_token_ids": (1, 2, 3),
            "llm.token_count.completion": 2,
            "llm.hosted_vllm.response_token_ids": (4, 5),
        },
        {},
    ]


async def test_parameters_by_openais_names_and_extra_body_are_sent() -> None:
    script = Says("Hi.")
    body = {"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}, "bad_words": ["no"]}
    params = {"temperature": 0.5, "max_tokens": 9, "stop": ["zz"], "top_logprobs": 2, "logprobs": True, "n": 1}
    model = named("vllm", script, params={**params, "extra_body": body})
    await Agent(model=model, callback_handler=None).invoke_async("Hello?")
    sampling = model.ledger[0].draft.sampling
    assert (sampling["temperature"], sampling["top_k"], sampling["stop"]) == (0.5, 5, ["zz"])
    assert sampling["extra"] == {"bad_words": ["no"]}
    assert script.requests[0].max_new_tokens == 9
    assert model.trajectory.column("top_ids", 0).shape[1] == 2
    with pytest.raises(ValueError, match=r"'vllm_xargs'.*Available: bad_words"):
        model.update_config(params={**params, "extra_body": {**body, "vllm_xargs": {"a": 1}}})
    with pytest.raises(ValueError, match="make a new model"):
        model.update_config(params={"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}})
    model.update_config(params={**params, "temperature": 0, "extra_body": body})
    assert model.get_config()["params"]["temperature"] == 0  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match=r"temperature.*params"):
        model.update_config(temperature=1)
    with pytest.raises(ValueError, match=r"model_id.*new model"):
        model.update_config(model_id="other")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"params": {"temprature": 1}}, "'temprature'.*'temperature'"),
        ({"params": {"tool_choice": "required"}}, "tool_choice='required'.*'auto'"),
        ({"params": {"n": 2}}, "n=2.*rollouts"),
        ({"params": {"extra_body": {"guided_json": {}}}}, "grammar"),
        ({"params": {"parallel_tool_calls": False}}, "parallel_tool_calls=False.*max_parallel_tool_calls=1"),
        ({"params": {"extra_headers": {"X-A": "b"}}}, "extra_headers.*X-A.*VLLMBackend.*headers=..."),
        ({"params": {"response_format": {"type": "xml"}}}, "response_format.*xml.*json_schema"),
        ({"params": {"response_format": "json_schema"}}, "response_format.*json_schema"),
        ({"params": {"timeout": -1}}, "turn_timeout_s.*-1"),
        ({"params": {"top_k": 3}, "sampling": {"top_k": 4}}, "sampling.*params"),
        ({"client": object()}, "client=.*base_url"),
    ],
)
def test_a_bad_option_is_refused_when_the_model_is_made(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VLLMModel(base_url=URL, model_id="m", **options)


def test_the_configuration_is_that_of_strands_vllm() -> None:
    model = make_vllm_openai_model(
        base_url=URL, model_id="m", return_token_ids=True, disable_tools=True, params={"extra_body": {"foo": "bar"}}
    )
    assert isinstance(model, VLLMModel)
    config: Any = model.get_config()
    assert config["model_id"] == "m"
    assert config["params"] == {"tool_choice": "none", "extra_body": {"foo": "bar", "return_token_ids": True}}


async def test_the_context_limit_is_at_most_the_servers_once_it_is_known() -> None:
    model = named("vllm", Says("Hi."), context_window_limit=10**6)
    assert model.context_window_limit == 10**6
    await Agent(model=model, callback_handler=None).invoke_async("Hello?")
    assert model.context_window_limit == 4096
    assert named("vllm", Says("Hi.")).context_window_limit is None


async def test_a_missing_tokenizer_fails_at_the_first_turn(tmp_path: Any) -> None:
    model = VLLMModel(base_url=URL, model_id=str(tmp_path / "none"))
    with pytest.raises(TokenizerError, match="none"):
        await Agent(model=model, callback_handler=None).invoke_async("Hello?")


async def test_an_unreachable_server_fails_at_the_first_turn() -> None:
    model = VLLMModel(base_url="http://127.0.0.1:9/v1", model_id="m", tokenizer=tokenizer(), api_key="EMPTY")
    model._policy_options["patience_s"] = 0
    with pytest.raises(EngineConnectionError):
        await Agent(model=model, callback_handler=None).invoke_async("Hello?")


async def test_disabled_tools_are_not_in_the_prompt() -> None:
    lengths = []
    for disabled in (True, False):
        model = named("vllm", Says("Hi."), disable_tools=disabled)
        await Agent(model=model, tools=[add], callback_handler=None).invoke_async("Hello?")
        lengths.append(model.rollout.initial_prompt_length)
    assert lengths[0] < lengths[1]


@pytest.mark.parametrize("options", [{"disable_tools": True}, {"params": {"tool_choice": "none"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_with_tools_disabled_calls_are_text(options: dict[str, Any], stream: bool) -> None:
    ran = []

    @tool
    def add(a: int, b: int) -> str:
        """Add.

        Args:
            a: One.
            b: The other.
        """
        ran.append((a, b))
        return str(a + b)

    model = named("vllm", Says(CALL, f"So: {CALL}", "It is 5."), stream=stream, **options)
    agent = Agent(model=model, tools=[add], callback_handler=None)
    for question, answer in (("2 + 3?", CALL), ("Please?", f"So:\n{CALL}"), ("Well?", "It is 5.")):
        result = await agent.invoke_async(question)
        assert (result.stop_reason, str(result).strip()) == ("end_turn", answer)
    assert ran == []
    assert len(model.ledger) == 3
    assert len(model.rollouts) == 1, "no branch"
    check_ledger(model.ledger)
    specs = agent.tool_registry.get_all_tool_specs()
    prompt = agent.messages[:1]
    assert await model.count_tokens(prompt, specs) == pytest.approx(model.rollout.initial_prompt_length, abs=5)


class Total(BaseModel):
    """A total."""

    value: int


@pytest.mark.parametrize("options", [{"disable_tools": True}, {"params": {"tool_choice": "none"}}])
async def test_with_tools_disabled_structured_output_works(options: dict[str, Any]) -> None:
    forced = call("Total", '{"value": 5}')
    by_grammar = {False: '{"value": 5}', True: forced}
    says = Says(lambda request: by_grammar["structural_tag" in str(request.grammar)] if request.grammar else "Five.")
    agent = Agent(model=named("vllm", says, **options), callback_handler=None)
    result = await agent.invoke_async("2 + 3?", structured_output_model=Total)
    assert result.structured_output == Total(value=5)


def error_of(hooks: VLLMToolValidationHooks, name: str, arguments: Any) -> str:
    agent: Any = SimpleNamespace(tool_registry=SimpleNamespace(registry={"add": add, "sub": add}))
    registry = HookRegistry()
    hooks.register_hooks(registry)
    selected: Any = add if name == "add" else None
    event = BeforeToolCallEvent(
        agent=agent,
        selected_tool=selected,
        tool_use={"toolUseId": "t", "name": name, "input": arguments},
        invocation_state={},
    )
    registry.invoke_callbacks(event)
    return str(event.cancel_tool or "")


def test_invalid_calls_are_cancelled() -> None:
    hooks = VLLMToolValidationHooks()
    assert error_of(hooks, "add", {"a": 1, "b": 2}) == ""
    unknown = error_of(hooks, "nope", {})
    assert all(word in unknown for word in ("'nope'", "add", "sub"))
    assert "'b'" in error_of(hooks, "add", {"a": 1})
    assert "'integer'" in error_of(hooks, "add", {"a": "x", "b": 2})
    assert "object, not 'no dict'" in error_of(hooks, "add", "no dict")
    assert hooks.unknown_calls == {"nope": 1}
    assert "add" not in error_of(VLLMToolValidationHooks(False), "nope", {})
    assert "1 more" in error_of(VLLMToolValidationHooks(max_allowed_tools_in_error=1), "nope", {})
    few = VLLMToolValidationHooks(False, 3)
    assert (few.include_allowed_tools_in_errors, few.max_allowed_tools_in_error) == (False, 3)
    lax = VLLMToolValidationHooks(validate_input_shape=False)
    assert error_of(lax, "add", {"a": 1}) == ""
    assert error_of(lax, "nope", {}) != ""
    lax.before_tool_call(BeforeToolCallEvent(SimpleNamespace(), add, {"toolUseId": "", "name": "add", "input": 1}, {}))  # type: ignore[arg-type]
