"""What a user's code changes takes effect, or is refused: parsers, clients, methods of subclasses, parameters."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from pydantic import BaseModel
from strands import Agent, tool

from strands_tito.testing import InProcessTransport, always
from strands_tito.testing import faults as planted
from support.scripted import Says, call, engine_of, tokenizer
from tito_sglang import SGLangClient, SGLangClientError, SGLangModel
from tito_sglang.tool_parsers import HermesToolParser, ToolParser, ToolParseResult, get_tool_parser
from tito_vllm import VLLMModel


class Shouted(ToolParser):
    """Reads the word LOOK as a call."""

    def parse(self, text: str) -> list[ToolParseResult]:
        return [ToolParseResult("call", "look", {})] if "LOOK" in text else []


class Answer(BaseModel):
    number: int


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


def test_a_replaced_pattern_is_refused() -> None:
    parser = HermesToolParser()
    parser.tool_pattern = re.compile("```(.*?)```")
    with pytest.raises(ValueError, match="tool_pattern of the format 'hermes' was replaced"):
        SGLangModel(client=client_of(), tokenizer=tokenizer(), tool_parser=parser)
    with pytest.raises(ValueError, match="tool_pattern"):
        parser.parse("```{}```")


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
    with pytest.raises(TypeError, match=f"Mine overrides {name}, which a turn does not call"):
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


def test_the_one_event_of_a_structured_output_is_the_output() -> None:
    model = SGLangModel(client=client_of('{"number": 3}'), tokenizer=tokenizer(), tool_parser="hermes")

    async def events() -> list[Any]:
        prompt: Any = [{"role": "user", "content": [{"text": "Hi"}]}]
        return [event async for event in model.structured_output(Answer, prompt)]

    assert asyncio.run(events()) == [{"output": Answer(number=3)}]


@pytest.mark.parametrize(
    "field", [{"chat_template": "x"}, {"documents": [{}]}, {"continue_final_message": True}, {"prompt_token_ids": [1]}]
)
def test_chat_fields_that_the_server_would_ignore_are_refused(field: dict[str, Any]) -> None:
    options: Any = {"base_url": "http://scripted", "model_id": "scripted", "tokenizer": tokenizer()}
    with pytest.raises(ValueError, match=f"{next(iter(field))} cannot be set"):
        VLLMModel(**options, params={"extra_body": field})
    VLLMModel(**options, params={"extra_body": {"continue_final_message": False, "add_generation_prompt": True}})
