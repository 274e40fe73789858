"""Code written for strands-sglang and strands-vllm runs after the import is changed."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import tito_sglang.sglang
from pydantic import BaseModel
from strands import Agent
from strands.types.exceptions import ContextWindowOverflowException, EventLoopException

from strands_tito.export.sample import samples_of
from support.histories import add
from support.names import client_of, named
from support.scripted import BACKENDS, Says, call, engine_of, ids_of, tokenizer
from tito_compat.sglang_client import SGLangTimeoutError
from tito_compat.sglang_parsers import (
    HermesToolParser,
    ToolParser,
    ToolParseResult,
    get_tool_parser,
    register_tool_parser,
)
from tito_conformance.testing import Fault, always, first
from tito_core.hooks import LoopLimiter
from tito_core.ledger import check_ledger
from tito_sglang import (
    SGLangClient,
    SGLangContextLengthError,
    SGLangDecodingError,
    SGLangHTTPError,
    SGLangModel,
    decode_routed_experts,
)
from tito_vllm import VLLMModel

by_kind = pytest.mark.parametrize("kind", BACKENDS)
CALL = call("add", '{"a": 2, "b": 3}')
MESSAGES: Any = [{"role": "user", "content": [{"text": "2 + 3?"}]}]


def agent_of(model: Any, **options: Any) -> Agent:
    return Agent(model=model, tools=[add], callback_handler=None, **options)


async def events_of(model: Any, messages: Any = MESSAGES) -> list[Any]:
    return [event async for event in model.stream(messages)]


# The README of strands-sglang 0.0 and 0.1.


async def test_a_model_is_made_from_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("sglang", Says(CALL, "Five."))
    made: list[tuple[str, float | None]] = []

    def get_client(base_url: str, *, timeout: float | None) -> SGLangClient:
        made.append((base_url, timeout))
        return client_of(engine)

    monkeypatch.setattr(tito_sglang.sglang, "get_client", get_client)
    model = SGLangModel(tokenizer=tokenizer(), base_url="http://localhost:30000/", timeout=None)
    assert made == [("http://localhost:30000", None)]
    agent = agent_of(model)
    model.reset()
    await agent.invoke_async("2 + 3?")
    manager = model.token_manager
    assert manager.token_ids == model.trajectory.token_ids.tolist()
    assert manager.loss_mask == manager.output_mask == model.trajectory.loss_mask.tolist()
    assert len(manager.logprobs) == len(manager.token_ids)
    assert [len(segment) for segment in manager.segments] == [length for _, length in manager.segment_info]


async def test_the_oldest_names_work() -> None:
    """`from strands_sglang.tool_parser import HermesToolCallParser`, `tool_call_parser=`, `params=`."""
    parser = tito_sglang.HermesToolCallParser(bot_token="[", eot_token="]")
    assert isinstance(parser, tito_sglang.ToolCallParser)
    assert parser.parse('[{"name": "add", "arguments": {}}]')[0].name == "add"
    script = Says('[{"name": "add", "arguments": {"a": 2, "b": 3}}]', "Five.")
    model = named("sglang", script, tool_call_parser=parser, model_id="m", params={"max_new_tokens": 50})
    limiter = tito_sglang.ToolIterationLimiter(max_iterations=1)
    with pytest.raises(tito_sglang.MaxToolIterationsReachedError, match=r"\(1\)"):
        await agent_of(model, hooks=[limiter]).invoke_async("2 + 3?")
    manager: tito_sglang.TokenManager = model.token_manager
    assert len(manager.segments[0]) == manager.initial_prompt_length
    assert isinstance(manager.tokens[0], tito_sglang.Token)
    assert tito_sglang.UNKNOWN_TOOL_NAME == "unknown_tool"


def test_models_with_one_address_share_a_client() -> None:
    one, two = (SGLangModel(tokenizer(), base_url="http://localhost:30000") for _ in range(2))
    default = SGLangModel(tokenizer(), HermesToolParser())
    assert one.client is two.client is default.client
    assert isinstance(default.tool_parser, HermesToolParser)


# Routed experts.


async def test_routed_experts_are_flat_until_the_shape_is_known() -> None:
    script = Says(CALL, "It is 5.")
    flat = named("sglang", script, engine={"experts": (3, 2)}, return_routed_experts=True)
    shaped = named("sglang", Says(CALL, "It is 5."), engine={"experts": (3, 2)}, return_routed_experts=(3, 2))
    assert flat.routed_experts is None
    for model in (flat, shaped):
        await agent_of(model).invoke_async("2 + 3?")
        check_ledger(model.ledger)
    tokens = len(flat.rollout)
    decoded = decode_routed_experts(flat.routed_experts, seq_len=tokens, num_layers=3, top_k=2)
    assert decoded.shape == (tokens - 1, 3, 2)
    assert np.array_equal(decoded, shaped.trajectory.column("routed_experts", 255)[: tokens - 1])
    assert flat.routed_experts == shaped.routed_experts
    assert len(shaped.rollout.routed_experts) == 2, "one a turn"
    assert np.array_equal(shaped.rollout.decode_routed_experts(3, 2), decoded)
    assert flat.trajectory.column("routed_experts", 255).shape == (tokens, 6)
    with pytest.raises(ValueError, match=r"routed_experts=\(layers"):
        samples_of(flat.ledger)
    with pytest.raises(ValueError, match="reshape"):
        decode_routed_experts(flat.routed_experts, seq_len=tokens, num_layers=5, top_k=2)


# Errors.


@pytest.mark.parametrize("limit", [{"max_tool_iters": 1}, {"max_tool_calls": 1}, {"max_messages": 1}])
async def test_a_limit_error_has_the_peers_error_as_its_cause(limit: dict[str, int]) -> None:
    agent = agent_of(named("sglang", Says(CALL)), hooks=[LoopLimiter(**limit)])
    with pytest.raises(Exception, match="1") as caught:
        await agent.invoke_async("2 + 3?")
    cause = caught.value.__cause__
    assert type(cause) is type(caught.value)
    assert isinstance(cause, tito_sglang.LoopLimitReachedError)
    assert isinstance(caught.value, EventLoopException)
    assert str(caught.value).startswith("Max ")
    assert cause.__cause__ is None, "a chain that ends"


@pytest.mark.parametrize(
    "words",
    [
        "Requested token count exceeds the maximum number of tokens: 5000 > 4096.",
        "The request of 5000 tokens exceeds the KV memory budget of 4096.",
        "Input token count exceed the max model len of 4096",
        "Prompt is too long for this model",
    ],
)
async def test_a_full_memory_is_a_context_overflow(words: str) -> None:
    engine = engine_of("sglang", Says("Five."))
    model = SGLangModel(client=client_of(engine), tokenizer=tokenizer())
    await events_of(model)
    engine.fault = always(Fault(status=400, body=json.dumps({"error": {"message": words}}).encode()))
    with pytest.raises(SGLangContextLengthError) as caught:
        await events_of(model)
    assert isinstance(caught.value, ContextWindowOverflowException)


# The client's retries.

NOT_JSON = Fault(body=b"<html>")
GENERATE: Any = {"sampling_params": {"max_new_tokens": 9}}


@pytest.mark.parametrize("fault", [Fault(status=408), NOT_JSON, Fault(status=503)])
async def test_a_transient_answer_is_retried(fault: Fault) -> None:
    engine = engine_of("sglang", Says("Five."), fault=first(2, fault))
    answer = await client_of(engine, retry_delay=0.0).generate(ids_of("Hello"), **GENERATE)
    assert answer["output_ids"] == ids_of("Five.<|im_end|>")
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert sum(exchange.path == "/generate" for exchange in engine.exchanges) == 3


@pytest.mark.parametrize(
    ("fault", "error"),
    [(Fault(status=408), SGLangHTTPError), (NOT_JSON, SGLangDecodingError), (None, SGLangTimeoutError)],
)
async def test_the_last_error_is_raised(fault: Fault | None, error: type[Exception]) -> None:
    options: dict[str, Any] = {"latency": 30.0} if fault is None else {"fault": always(fault)}
    path = "/abort_request" if fault is None else "/generate"
    engine = engine_of("sglang", Says("Five."), **options)
    client = client_of(engine, retry_delay=0.0, max_retries=2, timeout=0.05 if fault is None else 60)
    with pytest.raises(error):
        await client.generate(ids_of("Hello"), **GENERATE)
    assert sum(exchange.path == path for exchange in engine.exchanges) == 3


async def test_a_late_answer_is_aborted_and_retried() -> None:
    waits = iter([30.0, 0.0])
    engine = engine_of("sglang", Says("Five."), latency=lambda _: next(waits, 0.0))
    answer = await client_of(engine, timeout=0.2, retry_delay=0.0).generate(ids_of("Hello"), **GENERATE)
    assert answer["output_ids"] == ids_of("Five.<|im_end|>")
    assert [exchange.path for exchange in engine.exchanges] == ["/abort_request", "/generate"]


@pytest.mark.parametrize("status", [400, 404, 409, 422])
async def test_another_4xx_is_not_retried(status: int) -> None:
    engine = engine_of("sglang", Says("Five."), fault=always(Fault(status=status)))
    with pytest.raises(SGLangHTTPError):
        await client_of(engine, retry_delay=0.0).generate(ids_of("Hello"), **GENERATE)
    assert len(engine.exchanges) == 1


async def test_json_is_read_whatever_its_content_type() -> None:
    body = json.dumps({"text": "Hi", "meta_info": {}}).encode()
    engine = engine_of("sglang", Says("Five."), fault=always(Fault(body=body, content_type="text/plain")))
    assert await client_of(engine, max_retries=0).generate([1], **GENERATE) == {"text": "Hi", "meta_info": {}}


# The configuration is a live dict.


async def test_a_value_that_is_changed_in_config_is_sent() -> None:
    for kind, key in (("sglang", "sampling_params"), ("vllm", "params")):
        script = Says("Five.", "Six.", "Seven.")
        model: Any = named(kind, script, **{key: {"temperature": 0.5, "stop": ["zz"]}})
        held = model.config[key]
        held["temperature"] = 0.1
        await events_of(model)
        held["temperature"] = 0.2
        model.config[key]["stop"].append("yy")
        model.config["context_window_limit"] = 900
        assert model.config[key]["temperature"] == 0.2, "reading does not undo a change"
        await events_of(model)
        assert [request.temperature for request in script.requests] == [0.1, 0.2]
        assert model.ledger[1].draft.sampling["stop"] == ["zz", "yy"]
        assert model.context_window_limit == 900
        model.config[key] = MappingProxyType({"temperature": 0.3})
        model.update_config(context_window_limit=800)
        await events_of(model)
        assert script.requests[-1].temperature == 0.3
        assert model.config["context_window_limit"] == 800


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("sglang", {"sampling_params": {"temperature": -1}}, "temperature"),
        ("sglang", {"enable_thinking": False}, "enable_thinking"),
        ("sglang", {"temperature": 0.1}, "temperature"),
        ("vllm", {"params": {"temprature": 1}}, "temprature"),
        ("vllm", {"model_id": "other"}, "model_id"),
        ("vllm", {"backend": "other"}, "backend"),
    ],
)
async def test_a_bad_change_in_config_is_refused_at_the_next_turn(kind: str, change: Any, words: str) -> None:
    model: Any = named(kind, Says("Five."))
    await events_of(model)
    model.config.update(change)
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            await events_of(model)
    assert len(model.ledger) == 1


# Structured output.


class Total(BaseModel):
    """A total."""

    value: int


@by_kind
async def test_structured_output_after_a_run_leaves_the_rollout_as_it_was(kind: str) -> None:
    says = Says(lambda request: '{"value": 5}' if request.grammar else "Five.")
    model = named(kind, says)
    agent = agent_of(model)
    await agent.invoke_async("2 + 3?")
    held, before = model.rollout, model.rollout.model_copy(deep=True)
    with pytest.warns(DeprecationWarning, match="structured_output"):
        assert await agent.structured_output_async(Total, "Which total?") == Total(value=5)
    assert [event async for event in model.structured_output(Total, agent.messages)][-1]["output"] == Total(value=5)
    assert model.rollout is held
    assert held == before
    assert len(model.ledger) == 3, "the ledger has its turns"
    await agent.invoke_async("Sure?")
    assert len(held.segment_info) == 4
    assert held.token_ids[: len(before)] == before.token_ids
    assert model.token_manager is held
    model.reset()
    assert model.rollout_history == [held]
    assert model.rollout_history[0] is held


# Parsers of a user's own.


class Bracket(ToolParser):
    """Calls such as [add {"a": 1, "b": 2}]."""

    def parse(self, text: str) -> list[ToolParseResult]:
        found = []
        for number, part in enumerate(text.split("[")[1:]):
            name, _, arguments = part.partition("]")[0].partition(" ")
            try:
                found.append(ToolParseResult(f"call_{number}", name, json.loads(arguments)))
            except ValueError:
                found.append(ToolParseResult.from_parse_error(f"call_{number}", part, name))
        return found


class Upper(HermesToolParser):
    """Hermes with names in capitals."""

    def parse(self, text: str) -> list[ToolParseResult]:
        return [ToolParseResult(each.id, each.name.lower(), each.input, each.raw) for each in super().parse(text)]


class Same(HermesToolParser):
    """Hermes with a `parse` of its own."""

    def parse(self, text: str) -> list[ToolParseResult]:
        return super().parse(text)


async def test_a_parser_of_the_users_own_finds_the_calls_and_ids_stay_exact() -> None:
    text = 'Well. [add {"a": 2, "b": 3}]'
    model = named("sglang", Says(f"<think>[add draft]</think>{text}", "It is 5."), tool_parser=Bracket())
    agent = agent_of(model)
    result = await agent.invoke_async("2 + 3?")
    check_ledger(model.ledger)
    assert str(result).strip() == "It is 5."
    first_turn = model.ledger[0].draft
    assert first_turn.output_ids.tolist() == ids_of(f"<think>[add draft]</think>{text}<|im_end|>")
    (record,) = first_turn.calls
    assert (record.name, record.status) == ("add", "lenient")
    assert "Bracket.parse" in record.reason
    uses = [block["toolUse"]["input"] for block in agent.messages[1]["content"] if "toolUse" in block]
    assert uses == [{"a": 2, "b": 3}], "the draft in the reasoning is not a call"
    assert model.policy.detected.name == "Bracket"
    assert len(model.rollout.segment_info) == 4


async def test_a_call_that_the_users_parser_cannot_read_is_not_run() -> None:
    model = named("sglang", Says("[add {]", "No."), tool_parser=Bracket())
    await agent_of(model).invoke_async("2 + 3?")
    (record,) = model.ledger[0].draft.calls
    assert (record.name, record.status) == ("add", "malformed")
    assert model.tool_parse_errors == {"add": 1}


async def test_a_subclass_of_a_format_takes_its_calls_out_of_the_text() -> None:
    answer = f"Well. {call('ADD', json.dumps({'a': 2, 'b': 3}))}"
    model = named("sglang", Says(answer, "It is 5."), tool_parser=Upper())
    agent = agent_of(model)
    await agent.invoke_async("2 + 3?")
    (record,) = model.ledger[0].draft.calls
    ids = model.ledger[0].draft.output_ids.tolist()[record.start : record.stop]
    assert record.name == "add"
    assert tokenizer().decode(ids).strip().startswith("<tool_call>")
    assert agent.messages[1]["content"][0] == {"text": "Well."}


@pytest.mark.parametrize("parser", [Bracket(), HermesToolParser(), Same()])
async def test_structured_output_and_streaming_work_with_any_parser(parser: ToolParser) -> None:
    def answer(request: Any) -> str:
        if not request.grammar:
            return "Five."
        return call("Total", '{"value": 5}') if "structural_tag" in str(request.grammar) else '{"value": 5}'

    model = named("sglang", Says(answer), tool_parser=parser, stream=True)
    result = await agent_of(model).invoke_async("2 + 3?", structured_output_model=Total)
    assert result.structured_output == Total(value=5)
    check_ledger(model.ledger)


async def test_a_call_cannot_be_forced_in_a_format_without_a_grammar() -> None:
    model = named("sglang", Says("Five."), tool_parser=Bracket())
    with pytest.raises(ValueError, match="tool_choice"):
        [event async for event in model.stream(MESSAGES, [add.tool_spec], tool_choice={"any": {}})]


async def test_a_registered_parser_is_found_by_its_name() -> None:
    register_tool_parser("bracket")(Bracket)
    assert isinstance(get_tool_parser("bracket", tool_start_token="["), Bracket)
    model = named("sglang", Says('[add {"a": 2, "b": 3}]', "It is 5."), tool_parser="bracket")
    await agent_of(model).invoke_async("2 + 3?")
    assert [record.name for record in model.ledger[0].draft.calls] == ["add"]
    plain = named("sglang", Says("Five."))
    plain.client = model.client  # type: ignore[attr-defined]
    await events_of(plain)
    assert plain.policy.detected.name == "hermes", "models of one client with other parsers are not affected"


# Names and parameters.


def test_configuration_types_are_attributes_of_the_models() -> None:
    config: SGLangModel.SGLangConfig = {"sampling_params": {"temperature": 0.5}}
    assert SGLangModel(tokenizer(), base_url="http://localhost:30000", **config).config == config
    assert {"model_id", "params"} <= VLLMModel.OpenAIConfig.__annotations__.keys()


def test_an_empty_extra_body_is_not_shown() -> None:
    model: Any = named("vllm", Says(), params={"temperature": 0.5}, disable_tools=True)
    assert model.config["params"] == {"temperature": 0.5, "tool_choice": "none"}
    assert "extra_body" not in model.format_request(MESSAGES)
    model.config["params"]["extra_body"] = {"top_k": 4}
    model.update_config()
    assert model.config["params"]["extra_body"] == {"top_k": 4}


def test_format_request_is_a_chat_completions_request() -> None:
    model: Any = named("vllm", Says(), params={"temperature": 0.5})
    specs = [add.tool_spec]
    request = model.format_request(MESSAGES, specs, "Be brief.", {"tool": {"name": "add"}})
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert request["tools"][0]["function"]["name"] == "add"
    assert request["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert (request["model"], request["stream"], request["temperature"]) == ("scripted", True, 0.5)
    assert model.format_request(MESSAGES, specs, tool_choice={"any": {}})["tool_choice"] == "required"
    assert "tool_choice" not in model.format_request(MESSAGES)


async def test_parameters_of_openai_are_honoured() -> None:
    schema = Total.model_json_schema()
    script = Says('{"value": 5}')
    shape = {"type": "json_schema", "json_schema": {"name": "Total", "schema": schema}}
    params = {"response_format": shape, "parallel_tool_calls": True, "extra_headers": {}, "user": "me", "timeout": 30}
    model: Any = named("vllm", script, params=params)
    await events_of(model)
    assert json.loads(model.ledger[0].draft.sampling["grammar"]["value"]) == schema
    assert model._settings.turn_timeout_s == 30
    assert "user" not in model.ledger[0].draft.sampling.get("extra", {})
    model.update_config(params={"response_format": {"type": "json_object"}})
    await events_of(model)
    assert json.loads(model.ledger[1].draft.sampling["grammar"]["value"]) == {"type": "object"}
    model.update_config(params={"response_format": {"type": "text"}})
    await events_of(model)
    assert model.ledger[2].draft.sampling["grammar"] is None
