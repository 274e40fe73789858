"""The calls of the READMEs and examples of strands-sglang and strands-vllm, on scripted servers."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel
from strands import Agent
from strands.handlers.callback_handler import CompositeCallbackHandler
from strands.types.exceptions import EventLoopException

import tito_sglang
import tito_vllm
from support.histories import add
from support.names import client_of, named
from support.scripted import BACKENDS, Says, call, engine_of, ids_of, tokenizer
from support.seeing import NAME, PAD, shape
from support.slime_facts import PARAMETERS
from support.vision import image
from tito_compat.sglang import HermesToolCallParser, HermesToolParser, QwenXMLToolParser, ToolParser, get_tool_parser
from tito_conformance.testing import HashPolicy, scripted_engine
from tito_conformance.testing.pictures import picture
from tito_core.ledger import check_ledger
from tito_core.parsing import UnknownParserError, known_tool_parsers
from tito_sglang import LoopLimiter, SGLangClient, SGLangModel, ToolIterationLimiter, ToolLimiter
from tito_vllm import TokenManager, VLLMModel, VLLMTokenRecorder, VLLMToolValidationHooks

CALL = call("add", '{"a": 2, "b": 3}')
URL = "http://localhost:30000"
MESSAGES: Any = [{"role": "user", "content": [{"text": "2 + 3?"}]}]


class Total(BaseModel):
    value: int


def agent_of(model: Any, **options: Any) -> Agent:
    return Agent(model=model, tools=[add], **{"callback_handler": None, **options})


async def test_the_quick_start_and_the_math_agent_of_strands_sglang() -> None:
    client = client_of(engine_of("sglang", Says(CALL, "It is 5.")))
    assert "model_path" in (await client.model_info() or {})
    assert await client.get_model_info() == await client.model_info()
    model = SGLangModel(
        client=client,
        tokenizer=tokenizer(),
        tool_parser=get_tool_parser("hermes"),
        sampling_params={"max_new_tokens": 64},
    )
    model.reset()
    assert not model.rollout
    await agent_of(model, hooks=[LoopLimiter(max_tool_iters=5)]).invoke_async("2 + 3?")
    check_ledger(model.ledger)
    rollout = model.rollout
    assert rollout.token_ids == model.trajectory.token_ids.tolist()
    assert sum(rollout.loss_mask) == sum(length for is_output, length in rollout.segment_info if is_output)
    assert [is_output for is_output, _ in rollout.segment_info] == [False, True, False, True]
    assert all(isinstance(value, float) for value in rollout.logprobs[1:]), "prompts are scored too"
    assert model.tokenizer.decode(rollout.token_ids).count("It is 5.") == 1
    await client.close()


async def test_structured_output_is_not_part_of_the_rollout() -> None:
    model = named("sglang", Says('{"value": 5}', "Five."), sampling_params={"max_new_tokens": 64})
    events = [event async for event in model.structured_output(Total, MESSAGES, system_prompt="Add.")]
    assert events == [{"output": Total(value=5)}]
    assert len(model.rollout) == len(model.ledger) == 0


async def test_the_recipe_for_slime_of_strands_sglang_0_2() -> None:
    model = named("sglang", Says(CALL, "Five."), tool_parser=HermesToolParser(), sampling_params=PARAMETERS)
    limiter = ToolLimiter(max_tool_iters=5, max_tool_calls=None)
    await agent_of(model, hooks=[limiter], system_prompt="Be brief.").invoke_async("2 + 3?")
    tm = model.token_manager
    start = len(tm.segments[0])
    assert start == tm.initial_prompt_length
    assert [token.token_id for segment in tm.segments for token in segment] == tm.token_ids
    assert sum(tm.loss_mask[start:]) == sum(tm.loss_mask)
    assert model.tokenizer.decode(tm.token_ids[start:]).startswith("<tool_call>")  # type: ignore[attr-defined]
    assert (limiter.tool_iter_count, limiter.tool_call_count) == (1, 1)


async def test_the_names_of_strands_sglang_0_0_and_of_slimes_example(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(engine_of("sglang", Says(CALL, CALL)))
    monkeypatch.setattr("tito_compat.sglang.get_client", {URL: client}.__getitem__)
    model = SGLangModel(
        tokenizer=tokenizer(),
        base_url=f"{URL}/",
        model_id="some",
        params={"max_new_tokens": 50},
        tool_call_parser=HermesToolCallParser(),
    )
    limiter = ToolIterationLimiter(max_iterations=2)
    agent = agent_of(model, hooks=[limiter])
    with pytest.raises(tito_sglang.MaxToolIterationsReachedError, match=r"\(2\)") as raised:
        await agent.invoke_async("2 + 3?")
    assert isinstance(raised.value, EventLoopException)
    assert type(raised.value.__cause__) is type(raised.value), "which strands-env looks at"
    assert limiter.iteration_count == 2
    roles = [message["role"] for message in model.format_request_messages(agent.messages, None)]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    assert model.policy.info.model == "scripted"


def test_slimes_arguments_name_a_cached_client() -> None:
    args: Any = SimpleNamespace(
        sglang_router_ip="10.0.0.1",
        sglang_router_port=9000,
        sglang_server_concurrency=256,
        rollout_num_gpus=8,
        rollout_num_gpus_per_engine=2,
    )
    client = tito_sglang.get_client_from_slime_args(args, timeout=300.0)
    assert client is tito_sglang.get_client_from_slime_args(args, timeout=300.0)
    for each in (client, SGLangClient.from_slime_args(args)):
        assert each.base_url == "http://10.0.0.1:9000"
        assert each.backend.http.connection.max_connections == 1024


def test_a_tokenizer_is_loaded_once(tmp_path: Any) -> None:
    tokenizer().save_pretrained(tmp_path)
    assert tito_sglang.get_tokenizer(str(tmp_path)) is tito_sglang.get_tokenizer(str(tmp_path))


async def test_parsers_are_formats_by_name() -> None:
    for given in (None, "hermes", HermesToolParser(), get_tool_parser("hermes")):
        model = named("sglang", Says("Five."), tool_parser=given)
        assert (await model.connected()).detected.name == "hermes"
    named_by_the_peer = {get_tool_parser(name).name for name in ("hermes", "qwen_xml", "glm", "kimi_k2")}
    assert {QwenXMLToolParser().name, HermesToolCallParser().name} <= named_by_the_peer <= {*known_tool_parsers()}
    with pytest.raises(UnknownParserError, match="nope"):
        await named("sglang", Says(), tool_parser=get_tool_parser("nope")).connected()
    with pytest.raises(TypeError, match=r"Mine\.parse would not be called.*CallFormat"):
        type("Mine", (ToolParser,), {"parse": lambda self, text: []})


async def test_the_agent_with_pictures() -> None:
    qwen = tokenizer(NAME)
    script = HashPolicy(len(qwen), alphabet=range(1000, 2000), eos_ids=[qwen.eos_token_id], eos_weight=1e6)
    engine = scripted_engine("sglang", script, **shape())
    model = SGLangModel(client=client_of(engine), tokenizer=qwen, sampling_params={"max_new_tokens": 8})
    agent = Agent(model=model, callback_handler=None)
    await agent.invoke_async([image(picture(1)), {"text": "What is this?"}])
    await agent.invoke_async([{"text": "And this?"}, image(picture(2, 96, 64))])
    urls = [f"data:image/png;base64,{base64.b64encode(picture(*each)).decode()}" for each in ((1,), (2, 96, 64))]
    assert engine.requests[-1].body["image_data"] == model.rollout.image_data == urls
    assert model.rollout.token_ids.count(PAD) == 4 + 6


async def test_the_experts_of_each_turn_are_in_the_rollout() -> None:
    """strands-env passes `return_routed_experts`."""
    model = named("sglang", Says(CALL, "It is 5."), engine={"experts": (3, 2)}, return_routed_experts=True)
    await agent_of(model).invoke_async("2 + 3?")
    rows = b"".join(map(base64.b64decode, model.rollout.routed_experts))
    column = model.trajectory.column("routed_experts", 255)
    assert column.shape == (len(model.rollout), 6)
    assert rows == column[:-1].astype("<i4").tobytes()


async def test_the_quick_start_of_strands_vllm_records_what_was_sent() -> None:
    script = Says(CALL, CALL, "It is 5.")
    model = named("vllm", script, return_token_ids=True, params={"temperature": 0, "max_tokens": 128})
    recorder = VLLMTokenRecorder()
    await agent_of(model, callback_handler=CompositeCallbackHandler(recorder)).invoke_async("2 + 3?")
    assert script.requests[0].max_new_tokens == 128
    sent = [list(request.prompt_ids) for request in script.requests]
    assert [turn["prompt_token_ids"] for turn in recorder.history] == sent
    assert (recorder.prompt_token_ids, recorder.token_ids) == (sent[-1], ids_of("It is 5.<|im_end|>"))
    tm = TokenManager()  # the recipe for slime, which made 616 tokens of a context of 227
    for entry in recorder.history:
        tm.add_prompt(entry["prompt_token_ids"] or [])
        tm.add_response(entry["token_ids"] or [], entry["logprobs"])
    assert tm.model_dump() == model.token_manager.model_dump()
    recorder.reset()
    assert (recorder.prompt_token_ids, recorder.token_ids, recorder.history) == (None, None, [])


async def test_without_return_token_ids_a_recorder_gets_none() -> None:
    recorder = VLLMTokenRecorder()
    await agent_of(named("vllm", Says("Hi.")), callback_handler=recorder).invoke_async("Hello?")
    assert recorder.history == []


def test_the_span_gets_what_agent_lightning_reads() -> None:
    tracer = TracerProvider().get_tracer("test")
    fields = {"prompt_token_ids": [1, 2, 3], "token_ids": [4, 5]}
    event = {"messageStop": {"stopReason": "end_turn", "additionalModelResponseFields": fields}}
    attributes: list[dict[str, Any]] = []
    for adds in (True, False):
        with tracer.start_as_current_span("turn") as span:
            VLLMTokenRecorder(add_to_span=adds)(event=event)
        attributes.append(dict(span.attributes))  # type: ignore[attr-defined]
    expected = {
        "llm.token_count.prompt": 3,
        "llm.hosted_vllm.prompt_token_ids": (1, 2, 3),
        "llm.token_count.completion": 2,
        "llm.hosted_vllm.response_token_ids": (4, 5),
    }
    assert attributes == [expected, {}]


@pytest.mark.parametrize("ids", [["a"], [1.5], "12", [True], 7])
def test_a_recorder_refuses_ids_that_are_not_integers(ids: Any) -> None:
    recorder = VLLMTokenRecorder()
    stop = {"messageStop": {"additionalModelResponseFields": {"prompt_token_ids": [1], "token_ids": ids}}}
    with pytest.raises(TypeError, match=r"token_ids .* integer"):
        recorder(event=stop)
    assert recorder.history == []


async def test_with_tools_disabled_a_call_is_text_and_the_prompt_has_no_tools() -> None:
    script = Says(CALL)
    model = named("vllm", script, disable_tools=True)
    agent = agent_of(model)
    result = await agent.invoke_async("2 + 3?")
    assert result.stop_reason == "end_turn"
    assert agent.messages[1]["content"] == [{"text": CALL}]
    assert "add" not in tokenizer().decode(script.requests[0].prompt_ids)
    specs = agent.tool_registry.get_all_tool_specs()
    assert await model.count_tokens(MESSAGES, specs) == await model.count_tokens(MESSAGES, [])


async def test_the_validation_hooks_cancel_a_call_of_an_unknown_tool() -> None:
    agent = agent_of(named("vllm", Says(call("print", "{}"), "No.")), hooks=[VLLMToolValidationHooks()])
    await agent.invoke_async("Print.")
    assert "'print'" in str(agent.messages[2]["content"][0]["toolResult"]["content"])


async def test_template_arguments_and_the_key_of_a_vllm_server() -> None:
    body = {"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}}
    model = named("vllm", Says("Hi."), params={"stop": "zz", "min_tokens": 1, "extra_body": body})
    await agent_of(model).invoke_async("Hello?")
    sampling = model.ledger[0].draft.sampling
    assert (sampling["top_k"], sampling["stop"], sampling["min_new_tokens"]) == (5, ["zz"], 1)
    assert model.policy.template.arguments["enable_thinking"] is False
    model = VLLMModel(base_url="http://host:1/v1/", model_id="m", api_key="key", tokenizer=tokenizer())
    assert model._policy_options["base_url"] == "http://host:1"
    assert model._policy_options["api_key"] == "key"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("sglang", {"sampling_params": {"temprature": 1}}, "'temprature'.*'temperature'"),
        ("sglang", {"sampling_parameters": {}}, "'sampling_parameters'"),
        ("sglang", {"sampling": {"top_k": 3}, "sampling_params": {"top_k": 4}}, "sampling and top_k"),
        ("sglang", {"context_window_limit": 0}, "context_window_limit.*0"),
        ("vllm", {"params": {"tool_choice": "required"}}, "'tool_choice'"),
        ("vllm", {"params": {"extra_body": {"guided_json": {}}}}, "guided_json"),
        ("vllm", {"client": object()}, "'client'"),
        ("vllm", {"base_url": "http://other"}, "base_url"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(kind: str, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        named(kind, Says(), **options)


def test_a_vllm_model_needs_an_address() -> None:
    with pytest.raises(TypeError, match="base_url is missing"):
        VLLMModel(model_id="m")


@pytest.mark.parametrize("kind", BACKENDS)
async def test_malformed_calls_are_counted_by_tool(kind: str) -> None:
    model = named(kind, Says(call("add", "{"), "<tool_call>{</tool_call>", CALL, "Five."))
    assert model.tool_parse_errors == {}
    await agent_of(model).invoke_async("2 + 3?")
    assert sum(model.tool_parse_errors.values()) == 2
    assert model.tool_parse_errors["unknown_tool"] >= 1
    model.reset()
    assert model.tool_parse_errors == {}


async def test_a_limit_can_be_changed_between_invocations_as_strands_env_does() -> None:
    limiter = LoopLimiter(max_messages=1)
    agent = Agent(model=named("sglang", Says("Yes.")), hooks=[limiter], callback_handler=None)
    for more in (1, 3):
        with pytest.raises(tito_sglang.MaxMessagesReachedError):
            await agent.invoke_async("Go on.")
        limiter.max_messages = limiter.message_count + more
        if more > 1:
            assert str(await agent.invoke_async("Go on.")).strip() == "Yes."
    assert limiter.message_count == len(agent.messages)
    assert tito_vllm.Token(3).loss_mask
