"""Invalid messages, tools and other arguments raise an error with their place and value; nothing is committed."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from support.conversations import LOOK, answer, calls, results, user
from support.scripted import BACKENDS, Says, model_of
from tito_core.backend.values import InvalidValueError
from tito_core.chat.message_check import InvalidMessageError
from tito_core.chat.messages import UnsupportedContentError
from tito_core.turn import request
from tito_core.turn.inputs import UnsupportedToolChoiceError

NAN = float("nan")
DEEP: Any = 1
for _ in range(5000):
    DEEP = [DEEP]
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


async def streamed(model: Any, *arguments: Any, **options: Any) -> int:
    return len([event async for event in model.stream(*arguments, **options)])


def user_blocks(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def use(**fields: Any) -> list[Any]:
    call = {"toolUseId": "call_0", "name": "look", "input": {}, **fields}
    return [user("a"), {"role": "assistant", "content": [{"toolUse": {k: v for k, v in call.items() if v != "-"}}]}]


def result(**fields: Any) -> list[Any]:
    shown = {"toolUseId": "call_0", "status": "success", "content": [], **fields}
    return [*use(), *user_blocks({"toolResult": {k: v for k, v in shown.items() if v != "-"}})]


def json_of(value: Any) -> list[Any]:
    return result(content=[{"text": "a"}, {"json": value}])


MESSAGES: list[tuple[Any, str]] = [
    ([], "messages is an empty list"),
    (None, "messages is None"),
    ("Hi", "messages is 'Hi'"),
    (user("a"), "messages is a dict with the keys 'role', 'content'"),
    (iter([user("a")]), "messages is of type list_iterator"),
    (["Hi"], r"messages\[0\] is 'Hi'"),
    ([user("a"), None], r"messages\[1\] is None"),
    ([{"content": []}], r"messages\[0\] has no role"),
    ([{"role": "tool", "content": []}], r"messages\[0\].* role 'tool'.*'user' or 'assistant'\.\n"),
    ([{"role": None, "content": []}], r"messages\[0\] has the role None.*'user' or 'assistant'"),
    ([{"role": ["user"], "content": []}], r"messages\[0\].* role a list"),
    ([{"role": "system", "content": []}], "system_prompt"),
    ([{1: 2}], r"messages\[0\] has no role"),
    ([{"role": "user"}], r"messages\[0\].* no content"),
    ([{"role": "user", "content": None}], r"\['content'\] is None: .*\[\{'text': 'Hi'\}\]"),
    ([{"role": "user", "content": "Hi"}], r"\['content'\] is 'Hi'"),
    (user_blocks("Hi"), r"\['content'\]\[0\] is 'Hi'"),
    (user_blocks({}), r"\['content'\]\[0\].* an empty dict"),
    (user_blocks({"foo": 1}), r"\['content'\]\[0\].* the keys 'foo'"),
    (user_blocks({1: 1}), r"\['content'\]\[0\].* the keys 1"),
    (user_blocks({"text": "a"}, {"text": "a", "image": {}}), r"\['content'\]\[1\] has the keys 'text', 'image'"),
    (user_blocks({"text": 5}), r"\['text'\] is 5"),
    (user_blocks({"text": None}), r"\['text'\] is None"),
    (user_blocks({"text": b"a"}), r"\['text'\] is of type bytes"),
    (user_blocks(use()[1]["content"][0]), "'toolUse'.* role 'user'.* an assistant message"),
    (user_blocks({"toolResult": None}), r"\['toolResult'\] is None"),
    (user_blocks({"image": {}}), r"\['image'\] is an empty dict: give \{'format'"),
    (user_blocks({"image": None}), r"\['image'\] is None: give a dict"),
    *(
        (user_blocks({"image": image}), r"\['image'\] is a dict .*'format': .*'bytes'")
        for image in ({"format": 5, "source": {}}, {"format": "png", "source": b""}, {"source": {"bytes": b""}})
    ),
    (use(name="-"), r"\['toolUse'\]\['name'\] is None"),
    (use(name=5), r"\['toolUse'\]\['name'\] is 5"),
    (use(toolUseId="-"), r"\['toolUse'\]\['toolUseId'\] is None"),
    (use(input="-"), r"\['toolUse'\] has no 'input'"),
    (use(input={"a": b"x"}), r"\['input'\]\['a'\] is of type bytes"),
    (use(input={"a": [NAN]}), r"\['input'\]\['a'\]\[0\] is nan"),
    (use(input={1: 2, "b": 3}), r"\['input'\].* key 1\b"),
    (use(input={"a": DEEP}), "100 levels"),
    (use(input={"a": ENDLESS}), "100 levels"),
    (use(input={"a": [10**4300]}), r"\['input'\]\['a'\]\[0\] is an integer of 14285 bits .*4300 digits"),
    (use(input='{"a": 1}'), r"\['input'\] of tool call 'call_0' is '\{\"a\": 1\}'.* a dict.*json\.loads"),
    (use(input=[1]), r"\['input'\] of tool call 'call_0' is a list"),
    (use(input=None), r"\['input'\] of tool call 'call_0' is None"),
    (result(content="-"), r"\['toolResult'\]\['content'\] is None"),
    (result(content="5"), r"\['toolResult'\]\['content'\] is '5'"),
    (result(content=["5"]), r"\['content'\]\[0\] is '5'"),
    (result(content=[{"text": 5}]), r"\['content'\]\[0\]\['text'\] is 5"),
    (result(content=[{"image": []}]), r"\['content'\]\[0\]\['image'\] is an empty list.*'bytes'"),
    (result(toolUseId="-"), r"\['toolResult'\]\['toolUseId'\] is None"),
    (result(toolUseId=[]), r"\['toolResult'\]\['toolUseId'\]"),
    (result(unknown=DEEP), "100 levels"),
    (result(unknown=10**5000), "4300 digits"),
    (
        [user("a"), {"role": "assistant", "content": [{"toolResult": {}}]}],
        "role 'assistant'.* user",
    ),
    ([user("a"), {"role": "assistant", "content": [{"reasoningContent": "x"}]}], r"\['reasoningContent'\] is 'x'"),
    *(
        ([user("a"), {"role": "assistant", "content": [{"reasoningContent": {"reasoningText": thought}}]}], words)
        for thought, words in (
            ({}, r"\['reasoningText'\]\['text'\] is None"),
            ("a", r"\['reasoningContent'\]\['reasoningText'\] is 'a'"),
        )
    ),
]
IMAGE = {"format": "png", "source": {"bytes": b"x"}}
UNSUPPORTED: list[tuple[Any, str]] = [
    (user_blocks({"video": {}}), r"[Mm]essage 0 \(user\).*'video'"),
    ([user("a"), {"role": "assistant", "content": [{"image": IMAGE}]}], r"essage 1 \(assistant\) holds an image"),
    (user_blocks({"image": {"format": "png", "source": {}}}), r"\['source'\] is an empty dict\. .*'bytes'"),
    (user_blocks({"image": {"format": "png", "source": {"location": {}}}}), r"\['image'\]\['source'\].*'bytes'"),
    (
        result(content=[{"image": {"format": "png", "source": {"bytes": bytearray(b"a")}}}]),
        r"\['content'\]\[0\]\['image'\]\['source'\] .*type bytearray.*bytes\(data\)",
    ),
    (user_blocks({"text": "a"}, {"guardContent": {}}), r"agent.messages\[0\]\['content'\]\[1\] = \{'text': '...'\}"),
    (result(content=[{"document": {}}]), "'document'.*'call_0'"),
    (result(content=[{}]), "'empty'.*'call_0'"),
    (
        result(content=[{"text": "a"}, {"text": "a", "image": IMAGE}]),
        r"'text' and 'image'.*'call_0'.*\['content'\]\[1\]",
    ),
    (result(content=[{"text": "a", "image": None}]), "'text' and 'image'.*'call_0'"),
    (result(content=[{"json": {}, "image": {"format": "png"}}]), "'json' and 'image'.*'call_0'"),
    (result(content=[{"text": "a", "json": 5}]), "'text' and 'json'.*'call_0'"),
    (result(content=[{"image": IMAGE, "video": {}}]), "'image' and 'video'.*'call_0'"),
    (json_of(NAN), r"\['json'\] is nan"),
    (json_of({"a": [float("-inf")]}), r"\['json'\]\['a'\]\[0\] is -inf"),
    (json_of({"a": b"x"}), r"\['json'\]\['a'\] is of type bytes"),
    (json_of([{1}]), r"\['json'\]\[0\] is of type set"),
    (json_of({(1, 2): 3}), r"\['json'\].* key a tuple"),
    (json_of([10**5000]), "4300 digits"),
    (json_of({"a": DEEP}), "100 levels"),
    (json_of({"a": ENDLESS}), "100 levels"),
]


@pytest.mark.parametrize("kind", BACKENDS)
async def test_invalid_messages_are_refused_and_leave_no_trace(kind: str) -> None:
    model = model_of(kind, Says("Yes."))
    cases = [*((given, words, InvalidMessageError) for given, words in MESSAGES)]
    cases += [(given, words, UnsupportedContentError) for given, words in UNSUPPORTED]
    for messages, words, error in cases:
        with pytest.raises(error, match=words) as caught:
            await streamed(model, messages)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 1_000
        assert (len(model.ledger), len(model.scripted.requests)) == (0, 0)
    for messages, words, error in cases:  # in the middle of a history, too
        if isinstance(messages, list) and not any(part in words for part in ("messages", "agent", "essage")):
            with pytest.raises(error, match=words):
                await streamed(model, [user("Hi?"), answer("Yes."), *messages, user("Well?")])
    assert (len(model.ledger), len(model.scripted.requests)) == (0, 0)
    await streamed(model, [user("Hi?")])
    assert len(model.ledger) == 1


SPECS: list[tuple[Any, str]] = [
    ("look", "tool_specs is 'look'"),
    (LOOK, "tool_specs is a dict"),
    ([None], r"tool_specs\[0\] is None"),
    ([LOOK, {}], r"tool_specs\[1\] is an empty dict.*'name'"),
    ([{**LOOK, "name": ""}], "non-empty string"),
    ([{**LOOK, "name": 5}], "non-empty string"),
    ([{"name": "look"}], r"tool_specs\[0\]\['inputSchema'\].*'look' is None"),
    ([{"name": "look", "inputSchema": "{}"}], r"'inputSchema'\].*'look' is '{}'"),
    ([{"name": "look", "inputSchema": {"type": "object"}}], "the keys 'type'"),
    ([{"name": "look", "inputSchema": {"json": "{}"}}], "the keys 'json'"),
    ([{**LOOK, "description": None}], r"'description'\].*'look' is None"),
    ([{"name": "look", "inputSchema": {"json": {"a": b"x"}}}], r"tool 'look'.* JSON.*type bytes"),
    ([{"name": "look", "inputSchema": {"json": {"a": DEEP}}}], "100 levels"),
    ([{**LOOK, "outputSchema": {"json": DEEP}}], "100 levels"),
    ([{**LOOK, "outputSchema": {"maximum": 10**5000}}], "bits"),
]
CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"system_prompt": 5}, InvalidMessageError, "system_prompt is 5"),
    ({"system_prompt_content": "x"}, InvalidMessageError, "system_prompt_content is 'x'"),
    ({"system_prompt_content": [{}, 5]}, InvalidMessageError, r"system_prompt_content\[1\] is 5"),
    ({"system_prompt_content": ({}, {"text": 5})}, InvalidMessageError, r"system_prompt_content\[1\]\['text'\] is 5"),
    ({"tool_choice": "any"}, UnsupportedToolChoiceError, "tool_choice 'any'.*'auto'"),
    ({"tool_choice": {}}, UnsupportedToolChoiceError, "tool_choice .*'auto'"),
    ({"tool_choice": {"tool": {}}}, UnsupportedToolChoiceError, "tool_choice .*'auto'"),
    ({"tool_choice": {"tool": "look"}}, UnsupportedToolChoiceError, "tool_choice .*'auto'"),
    ({"structured_output_model": dict}, InvalidValueError, "must be a subclass of pydantic.BaseModel"),
    ({"model_state": "x"}, InvalidValueError, "model_state .*dict.* str"),
    ({"model_state": 0}, InvalidValueError, "model_state .*dict.* int"),
    ({"tool_specs": [{**LOOK, "name": "\ud800"}], "tool_choice": {"any": {}}}, InvalidValueError, "valid string"),
    ({"cancel_signal": 5}, InvalidValueError, "cancel_signal .*threading.Event"),
]


@pytest.mark.parametrize("kind", BACKENDS)
async def test_invalid_tools_and_other_arguments_are_refused(kind: str) -> None:
    model = model_of(kind, Says("Yes."))
    for specs, words in SPECS:
        with pytest.raises(InvalidMessageError, match=words.replace("{", r"\{").replace(r"\\{", r"\{")):
            await streamed(model, [user("a")], specs)
    for options, error, words in CALLS:
        with pytest.raises(error, match=words):
            await streamed(model, [user("a")], **options)
    for wrong in (None, dict, "x"):
        with pytest.raises(InvalidValueError, match=r"must be a subclass of pydantic\.BaseModel"):
            _ = [event async for event in model.structured_output(wrong, [user("a")])]
    with pytest.raises(InvalidMessageError, match="messages is None"):
        await model.count_tokens(None)
    assert (len(model.ledger), len(model.scripted.requests)) == (0, 0)


@pytest.mark.parametrize(
    "messages",
    [[user("\ud800 and \udc00")], [user("a"), *calls(("look", {"at": "\ud800"})), results("\udfff")]],
)
async def test_half_of_a_surrogate_pair_is_allowed(messages: Any) -> None:
    model = model_of("vllm", Says("Yes."))
    await streamed(model, messages)
    assert len(model.ledger) == 1


async def test_keys_that_json_converts_to_strings_are_allowed_in_results() -> None:
    model = model_of("vllm", Says("Yes."))
    await streamed(model, json_of({1: "a", "b": 2, None: 3}))
    assert len(model.ledger) == 1


class Shape(BaseModel):
    at: str


async def test_a_valid_call_is_a_turn() -> None:
    model = model_of("vllm", Says('{"at": "x"}'))
    assert await streamed(model, [user("a")], [LOOK], "Be brief.", structured_output_model=Shape, model_state={})
    assert await streamed(model, (user("b"),), (LOOK,), tool_choice={"auto": {}})
    assert len(model.ledger) == 2


async def test_an_error_without_a_bad_value_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a defect of ours")

    monkeypatch.setattr(request, "prepare", broken)
    with pytest.raises(KeyError, match="a defect of ours"):
        async for _ in model_of("vllm", Says("Hi.")).stream([user("a")]):
            pass
