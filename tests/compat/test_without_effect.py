"""Changes by a user's code take effect or are refused: parsers, clients, methods of subclasses, parameters."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from strands import Agent, tool

from support.scripted import Says, call, engine_of, tokenizer
from tito_compat.sglang_parsers import HermesToolParser, ToolParser, ToolParseResult, get_tool_parser
from tito_conformance.testing import InProcessTransport, always
from tito_conformance.testing import engine as planted
from tito_core import Policy, TITOModel
from tito_core.backend.values import InvalidValueError
from tito_core.chat.messages import sampled_id
from tito_sglang import SGLangClient, SGLangClientError, SGLangModel
from tito_vllm import VLLMModel, VLLMTokenRecorder


class Shouted(ToolParser):
    """Reads the word LOOK as a call."""

    def parse(self, text: str) -> list[ToolParseResult]:
        return [ToolParseResult("call", "look", {})] if "LOOK" in text else []


def client_of(*answers: str, of: type[SGLangClient] = SGLangClient, **options: Any) -> SGLangClient:
    engine = engine_of("sglang", Says(*answers), **options)
    client = of("http://scripted", max_retries=3, retry_delay=0.0, http_transport=lambda: InProcessTransport(engine))
    client.scripted = engine  # type: ignore[attr-defined]
    return client


def looks(model: SGLangModel) -> list[str]:
    ran: list[str] = []

    @tool
    def look() -> str:
        """Look around."""
        ran.append("look")
        return "a room"

    Agent(model=model, tools=[look], callback_handler=None)("Hi")
    return ran


def test_a_parser_that_is_set_later_is_used() -> None:
    model = SGLangModel(client=client_of("LOOK", "Done."), tokenizer=tokenizer(), tool_parser="hermes")
    model.tool_parser = Shouted()
    assert looks(model) == ["look"]


@pytest.mark.parametrize("name", ["client", "tokenizer", "tool_parser"])
def test_parts_of_a_connected_model_do_not_change(name: str) -> None:
    model = SGLangModel(client=client_of("Done."), tokenizer=tokenizer(), tool_parser="hermes")
    looks(model)
    with pytest.raises(ValueError, match=f"{name} cannot change during a rollout"):
        setattr(model, name, getattr(model, name))


def test_a_replaced_parse_of_one_parser_is_used() -> None:
    parser = get_tool_parser("hermes")
    parser.parse = lambda text: []  # type: ignore[method-assign]
    model = SGLangModel(client=client_of(call("look", "{}"), "Done."), tokenizer=tokenizer(), tool_parser=parser)
    assert looks(model) == []


@pytest.mark.parametrize("where", ["before", "after"])
def test_replaced_patterns_and_tokens_are_used(where: str) -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    for new, answer in (("```", text.replace("<tool_call>", "```").replace("</tool_call>", "```")), ("", text)):
        parser = HermesToolParser(tool_end_token="</end>" if not new else None)
        model = SGLangModel(client=client_of(answer, "Done."), tokenizer=tokenizer(), tool_parser=parser)
        if new:
            parser.tool_pattern = re.compile(r"```(.*?)```")
            if where == "before":
                model.tool_parser = parser
        assert looks(model) == (["look"] if new else []), "another end token: not the text's"


def test_the_ids_of_a_users_parser_are_kept() -> None:
    class Mine(Shouted):
        def parse(self, text: str) -> list[ToolParseResult]:
            return [ToolParseResult("mine_7", "look", {})] if "LOOK" in text else []

    model = SGLangModel(client=client_of("LOOK", "Done."), tokenizer=tokenizer(), tool_parser=Mine())
    agent = Agent(model=model, tools=[], callback_handler=None)
    agent("Hi")
    (use,) = [block["toolUse"]["toolUseId"] for block in agent.messages[1]["content"] if "toolUse" in block]
    assert use.endswith(".mine_7")
    assert sampled_id(use) == "mine_7", "what a template writes"


def test_counts_of_errors_are_a_dict_that_can_be_cleared() -> None:
    bad = "<tool_call>{</tool_call>"
    model = SGLangModel(client=client_of(bad, bad, "Done.", bad, "Done."), tokenizer=tokenizer(), tool_parser="hermes")
    held = model.tool_parse_errors
    looks(model)
    assert held == {"unknown_tool": 2}
    assert model.tool_parse_errors is held
    held.clear()
    assert model.tool_parse_errors == {}
    looks(model)
    assert model.tool_parse_errors == {"unknown_tool": 1}
    model.tool_parse_errors = {}
    assert model.tool_parse_errors == {}
    model.reset()
    assert model.tool_parse_errors == {}


@pytest.mark.parametrize("ids", [["a"], [1.5], "12", [True], 7])
def test_a_recorder_refuses_ids_that_are_not_integers(ids: Any) -> None:
    recorder = VLLMTokenRecorder()
    stop = {"messageStop": {"additionalModelResponseFields": {"prompt_token_ids": [1], "token_ids": ids}}}
    with pytest.raises(TypeError, match=r"token_ids .* integer"):
        recorder(event=stop)
    assert recorder.history == []


def test_arguments_that_a_backend_object_would_ignore_are_refused() -> None:
    backend = SGLangClient("http://scripted").backend
    with pytest.raises(InvalidValueError, match=r"base_url, timeout_s .*SGLangBackend|_ClientBackend"):
        Policy.connect(backend=backend, base_url="http://other", tokenizer=tokenizer(), timeout_s=5.0)
    with pytest.raises(InvalidValueError, match="model_id"):
        TITOModel(backend=backend, tokenizer=tokenizer(), model_id="other")
    options: Any = {"model_id": "m", "tokenizer": tokenizer()}
    with pytest.raises(InvalidValueError, match="base_url, api_key"):
        VLLMModel(base_url="http://other", api_key="key", backend=backend, **options)
    with pytest.raises(TypeError, match="base_url is missing"):
        VLLMModel(**options)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (SGLangModel, "format_messages"),
        (SGLangModel, "format_tool_specs"),
        (SGLangModel, "tokenize_prompt_messages"),
        (VLLMModel, "format_request"),
        (VLLMModel, "format_request_messages"),
    ],
)
def test_a_method_that_no_turn_calls_cannot_be_overridden(model: type, name: str) -> None:
    with pytest.raises(TypeError, match=f"Mine overrides {name}"):
        type("Mine", (model,), {name: lambda self: None})


class Watched(SGLangClient):
    async def generate(self, input_ids: Any, **fields: Any) -> dict[str, Any]:
        return await super().generate(input_ids, **fields)


def test_a_clients_own_generate_is_refused_by_models() -> None:
    client = client_of("a", of=Watched)
    with pytest.raises(TypeError, match=r"does not call client\.generate"):
        looks(SGLangModel(client=client, tokenizer=tokenizer(), tool_parser="hermes"))


def test_samples_and_batches_come_as_a_list() -> None:
    client = client_of("a")
    answers: Any = asyncio.run(client.generate([1, 2], sampling_params={"n": 2, "max_new_tokens": 4}))
    assert [set(answer) >= {"output_ids", "meta_info"} for answer in answers] == [True, True]
    prompts: Any = [[1, 2], [3]]
    assert len(asyncio.run(client.generate(prompts, sampling_params={"max_new_tokens": 4}))) == 2


def test_the_number_of_retries_can_be_changed() -> None:
    client = client_of("a", fault=always(planted.Fault(status=500)))
    client.max_retries = 1
    with pytest.raises(SGLangClientError):
        asyncio.run(client.generate([1, 2]))
    assert len(client.scripted.exchanges) == 2  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="max_retries"):
        client.max_retries = -1
    assert client.max_retries == 1


@pytest.mark.parametrize(
    "field", [{"chat_template": "x"}, {"documents": [{}]}, {"continue_final_message": True}, {"prompt_token_ids": [1]}]
)
def test_chat_fields_that_the_server_would_ignore_are_refused(field: dict[str, Any]) -> None:
    options: Any = {"base_url": "http://scripted", "model_id": "scripted", "tokenizer": tokenizer()}
    with pytest.raises(ValueError, match=f"{next(iter(field))} cannot be set"):
        VLLMModel(**options, params={"extra_body": field})
    VLLMModel(**options, params={"extra_body": {"continue_final_message": False, "add_generation_prompt": True}})
