"""The parser of a policy: detected from the template, or named by the user; ours or an installed one."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from strands import Agent

from support.byte_level import byte_level
from support.distributions import write_distribution
from support.scripted import BACKENDS, Says, backend_of, call, engine_of, tokenizer
from tito_core import Policy, TITOModel
from tito_core.parsing import DetectionError, UnknownParserError, get_tool_parser, known_tool_parsers

CHATML = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


@pytest.mark.parametrize("name", ["smollm2", "qwen3-tiny"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_the_parser_is_detected_from_the_template_and_each_stage_is_logged(
    kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tito_core.policy"):
        engine = engine_of(kind, Says("", name=name), name)
        policy = Policy.connect(backend=backend_of(engine, kind), tokenizer=tokenizer(name))
    assert policy.detected.name == "hermes"
    assert "'<tool_call>'" in policy.detected.why
    values = [
        ("tokenizer", tokenizer(name).name_or_path),
        ("parser", "hermes"),
        ("backend", kind),
        ("version", policy.info.version),
    ]
    assert len(caplog.messages) == 5, "one message for each stage"
    for (option, value), message in zip(values, caplog.messages, strict=False):
        assert f"{option}=<{value}> | " in message
    assert policy.model().config["parser"] == "hermes"
    assert policy.parser.calls is get_tool_parser("hermes", tokenizer(name)).calls  # type: ignore[attr-defined]


def test_a_named_parser_is_used_whatever_the_template_shows() -> None:
    backend = backend_of(engine_of("vllm", Says("")), "vllm")
    model = TITOModel(backend=backend, tokenizer=tokenizer(), parser="qwen_xml")
    assert model.policy.detected.name == "qwen_xml"
    assert "user" in model.policy.detected.why
    with pytest.raises(UnknownParserError, match=r"'hermse'\. Did you mean 'hermes'\? Available: auto, "):
        TITOModel(backend=backend, tokenizer=tokenizer(), parser="hermse")


def test_a_template_without_tools_is_refused_with_the_remedy() -> None:
    plain = byte_level(template=CHATML)
    with pytest.raises(DetectionError, match="parser='hermes'"):
        Policy.connect(backend=backend_of(engine_of("vllm", Says("")), "vllm"), tokenizer=plain)


TOY = '''
from tito_core.parsing import CallStatus, NoCallGrammarError, ParsedCall, ParsedTurn


class Shout:
    """A call is one word in capitals; other text is its own reasoning."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def start(self, prompt_tail=(), tools=None):
        return Session(self.tokenizer)

    def call_grammar(self, tools, name=None, prompt_tail=()):
        raise NoCallGrammarError("Shouts cannot be forced.")


class Session:
    def __init__(self, tokenizer):
        self.tokenizer, self.ids = tokenizer, []

    def feed(self, ids):
        self.ids += ids

    def finish(self, *, truncated):
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.isupper():
            return ParsedTurn(text, text, ())
        call = ParsedCall(CallStatus.OK, text.lower(), {}, text, 0, len(self.ids))
        return ParsedTurn("", "", (call,))
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    points = "[tito.tool_parsers]\nshout = tito_toy_parser:Shout\n"
    monkeypatch.syspath_prepend(str(write_distribution(tmp_path, "tito_toy_parser", TOY, points)))
    yield
    sys.modules.pop("tito_toy_parser", None)


@pytest.mark.usefixtures("installed")
async def test_a_parser_of_another_package_is_found_and_used() -> None:
    assert "shout" in known_tool_parsers()
    backend = backend_of(engine_of("vllm", Says("NOW", call("now", "{}"), " \n", "a \n")), "vllm")
    policy = await Policy.connect_async(backend=backend, tokenizer=tokenizer(), parser="shout")
    model = policy.model()
    agent = Agent(model=model, callback_handler=None)
    await agent.invoke_async("When?")
    assert [[(c.name, c.status) for c in turn.draft.calls] for turn in model.ledger] == [[("now", "ok")], []]
    for blocks in ([], [{"reasoningContent": {"text": "a \n"}}, {"text": "a \n"}]):  # Strands would drop blank ones
        events: list[Any] = [event async for event in model.stream([{"role": "user", "content": [{"text": "b"}]}])]
        assert [event["contentBlockDelta"]["delta"] for event in events if "contentBlockDelta" in event] == blocks


def test_without_the_package_the_name_is_unknown() -> None:
    assert "shout" not in known_tool_parsers()
    with pytest.raises(UnknownParserError, match="tool parser 'shout'"):
        get_tool_parser("shout", tokenizer())
