"""Our side of rows of docs/migrating.md that no other test has: what differs from strands-sglang and strands-vllm."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from strands import Agent, tool
from strands.types.exceptions import StructuredOutputException

from support.names import client_of, named
from support.scripted import Says, call, engine_of, tokenizer
from tito_compat.sglang_parsers import GLMToolParser, HermesToolParser, QwenXMLToolParser
from tito_core.chat.messages import UnsupportedContentError
from tito_core.ledger import Ledger
from tito_sglang import SGLangModel
from tito_vllm import VLLMModel

CALL = call("say", '{"text": "Hi."}')


@tool
def say(text: str) -> str:
    """Say a text.

    Args:
        text: The text.
    """
    return text


def agent_of(model: Any, **options: Any) -> Agent:
    return Agent(model=model, tools=[say], callback_handler=None, **options)


def result_of(agent: Agent) -> str:
    return str(agent.messages[2]["content"][0]["toolResult"]["content"][0]["text"])


async def test_a_closing_tag_inside_an_argument_is_part_of_it() -> None:
    agent = agent_of(named("sglang", Says(call("say", '{"text": "a</tool_call>b"}'), "Done.")))
    await agent.invoke_async("Hi")
    assert result_of(agent) == "a</tool_call>b"


async def test_text_and_call_are_separate_blocks() -> None:
    agent = agent_of(named("sglang", Says(f"<think>Hm.</think>Well. {CALL}", "Done.")))
    await agent.invoke_async("Hi")
    reasoning, text, use = agent.messages[1]["content"]
    assert reasoning["reasoningContent"]["reasoningText"]["text"] == "Hm."
    assert (text, use["toolUse"]["input"]) == ({"text": "Well."}, {"text": "Hi."})


async def test_saved_messages_with_markup_in_the_text_render_the_call_twice() -> None:
    saved: Any = [
        {"role": "user", "content": [{"text": "Hi"}]},
        {
            "role": "assistant",
            "content": [{"text": CALL}, {"toolUse": {"toolUseId": "t", "name": "say", "input": {"text": "Hi."}}}],
        },
        {"role": "user", "content": [{"toolResult": {"toolUseId": "t", "status": "success", "content": []}}]},
    ]
    model = named("sglang", Says("Done."))
    await agent_of(model, messages=saved).invoke_async("Again")
    prompt = tokenizer().decode(model.rollout.token_ids)
    assert prompt.count('"text": "Hi."') == 2
    saved[1]["content"] = saved[1]["content"][1:]
    model = named("sglang", Says("Done."))
    await agent_of(model, messages=saved).invoke_async("Again")
    assert tokenizer().decode(model.rollout.token_ids).count('"text": "Hi."') == 1


@pytest.mark.parametrize("text", ['<tool_call>{"name": "say"}</tool_call>', '<tool_call>{"name": "say"', CALL[:-12]])
async def test_a_malformed_call_is_not_run_and_the_policy_reads_why(text: str) -> None:
    agent = agent_of(named("sglang", Says(text, "Done.")))
    await agent.invoke_async("Hi")
    assert "tito_malformed_call" in result_of(agent)
    assert len(agent.messages) == 4


def test_parsers_keep_blanks_and_refuse_missing_arguments() -> None:
    xml = "<tool_call>\n<function=f>\n<parameter=a>\n  x \n</parameter>\n</function>\n</tool_call>"
    assert QwenXMLToolParser().parse(xml)[0].input == {"a": "  x "}
    glm = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>  x </arg_value>\n</tool_call>"
    assert GLMToolParser().parse(glm)[0].input == {"a": "  x "}
    (result,) = HermesToolParser().parse('<tool_call>{"name": "f"}</tool_call>')
    assert (result.is_error, result.name) == (True, "f")


class Total(BaseModel):
    value: int


async def test_an_answer_without_the_schema_is_strands_error() -> None:
    model = named("sglang", Says('{"nope": 1}'))
    with pytest.raises(StructuredOutputException):
        [event async for event in model.structured_output(Total, [{"role": "user", "content": [{"text": "Hi"}]}])]


def test_reset_returns_the_ledger_and_no_parser_means_detection() -> None:
    model = SGLangModel(client=client_of(engine_of("sglang", Says("Hi."))), tokenizer=tokenizer())
    assert isinstance(model.reset(), Ledger)
    assert model.tool_parser is None
    for name in ("processed_messages", "tokenize_prompt_messages", "message_separator"):
        assert not hasattr(model, name)
    for name in ("format_chunk", "format_request_messages"):
        assert not hasattr(VLLMModel, name)


def test_parameters_that_are_not_given_are_sent() -> None:
    script = Says("Hi.")
    agent_of(named("sglang", script))("Hi")
    (request,) = script.requests
    assert (request.temperature, request.max_new_tokens) == (1.0, 1024)


def test_format_messages_has_calls_and_tool_names() -> None:
    messages: Any = [
        {"role": "assistant", "content": [{"toolUse": {"toolUseId": "t", "name": "say", "input": {"text": "Hi."}}}]},
        {"role": "user", "content": [{"toolResult": {"toolUseId": "t", "content": [{"json": {"a": 1}}]}}]},
    ]
    called, answered = SGLangModel.format_messages(messages)
    assert called["tool_calls"][0]["function"]["name"] == "say"
    assert (answered["name"], answered["content"]) == ("say", '{"a": 1}')


IMAGE: Any = {"image": {"format": "png", "source": {"bytes": b"png"}}}
URL = "data:image/png;base64,cG5n"


def test_messages_with_images_are_formatted_for_processors() -> None:
    messages: Any = [
        {"role": "user", "content": [{"text": "Look."}, IMAGE]},
        {
            "role": "assistant",
            "content": [{"text": "Well."}, {"toolUse": {"toolUseId": "t", "name": "f", "input": {}}}],
        },
        {"role": "user", "content": [{"toolResult": {"toolUseId": "t", "content": [{"json": {"a": 1}}, IMAGE]}}]},
    ]
    picture = {"type": "image", "image": URL}
    system, user, assistant, result = SGLangModel.format_messages(messages, "Be brief.", is_multimodal=True)
    assert system == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert user["content"] == [{"type": "text", "text": "Look."}, picture]
    assert (assistant["content"], len(assistant["tool_calls"])) == ([{"type": "text", "text": "Well."}], 1)
    assert result == {"role": "tool", "tool_call_id": "t", "content": [{"type": "text", "text": '{"a": 1}'}, picture]}
    assert SGLangModel.collect_image_data(messages, is_multimodal=True) == [URL, URL]
    assert SGLangModel.collect_image_data(messages) == []
    with pytest.raises(UnsupportedContentError, match=r"^A 'image' block cannot be formatted") as raised:
        SGLangModel.format_content_block(IMAGE)
    assert isinstance(raised.value, KeyError)


def test_tool_results_are_sorted_by_number() -> None:
    order: Any = [10, 2, 1]
    content = [{"toolResult": {"toolUseId": f"functions.f:{number}", "content": []}} for number in order]
    messages: Any = [{"role": "assistant", "content": [{"text": "a"}]}, {"role": "user", "content": content}]
    first_message, answered = SGLangModel.sort_tool_results(messages)
    assert first_message is messages[0]
    assert [block["toolResult"]["toolUseId"][-2:] for block in answered["content"]] == [":1", ":2", "10"]


async def test_usage_counts_cached_tokens() -> None:
    result = await agent_of(named("vllm", Says("Hi."))).invoke_async("Hi")
    assert "cacheReadInputTokens" in result.metrics.accumulated_usage
