"""Deltas of the package `renderers`, compared with the template's own: `tito template check --against renderers`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from strands_tito.inspect.template_check import RendererComparison, RendererTokenizer, plain
from support import zoo
from support.attacks import attack, controls
from support.byte_level import CHATML_TOOLS, byte_level, shared
from support.conversations import LOOK, calls, results
from tito_core.chat.template import ChatTemplate, TemplateError
from tito_core.chat.traced import Traced

PAIRS = {
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_8": "qwen3.8",
    "llama3_1": "llama-3",
    "nemotron_3_nano": "nemotron-3",
}


class Chatml:
    """A renderer for the tests' own template, like those of the package; `spoil` changes its result."""

    def __init__(self, tokenizer: Any, spoil: Callable[[list[int]], Any] = lambda ids: ids) -> None:
        self.tokenizer = tokenizer
        self.spoil = spoil
        self.lengths: list[int] = []

    def bridge_to_next_turn(self, prompt: Any, completion: Any, new: Any, *, tools: Any = None) -> Any:
        start, end = (self.tokenizer.convert_tokens_to_ids(text) for text in ("<|im_start|>", "<|im_end|>"))
        opened, closed = (
            self.tokenizer.convert_tokens_to_ids(text) for text in ("<tool_response>", "</tool_response>")
        )
        self.lengths.append(len(prompt) + len(completion))
        ids = [*prompt, *completion, *self.encode("\n")]
        for i, message in enumerate(new):
            assert type(message["content"]) is str
            if message["role"] == "tool":
                first, last = (not 0 <= j < len(new) or new[j]["role"] != "tool" for j in (i - 1, i + 1))
                ids += [start, *self.encode("user\n")] if first else self.encode("\n")
                ids += [opened, *self.encode("\n" + message["content"] + "\n"), closed]
                ids += [end, *self.encode("\n")] if last else []
            else:
                ids += [start, *self.encode(f"{message['role']}\n{message['content']}"), end, *self.encode("\n")]
        return self.spoil([*ids, start, *self.encode("assistant\n")])

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def compared(make: Any, **options: Any) -> list[str]:
    template = ChatTemplate.of(shared(), **options)
    return list(RendererComparison.of(make, shared(), template).differences())


def test_an_equal_renderer_has_no_differences() -> None:
    assert compared(Chatml) == []
    assert RendererComparison.of(Chatml, shared(), ChatTemplate.of(shared())).name == "Chatml"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ids: [*ids[:-1], ids[-1] + 1], r"differs from the chat template at token \d+ of a delta for messages"),
        (lambda ids: ids[:-1], r"differs from the chat template at token \d+"),
        (lambda ids: [*ids, 5], r"differs from the chat template at token \d+"),
        (lambda ids: [ids[0] + 1, *ids[1:]], "changes the turn that it extends .*, which breaks law 1"),
        (lambda ids: None, r"cannot extend a turn by messages with roles \['user'\]"),
        (lambda ids: 1 / 0, "fails to extend a turn: ZeroDivisionError"),
    ],
)
def test_differences_are_shown(spoil: Any, message: str) -> None:
    found = compared(lambda tokenizer: Chatml(tokenizer, spoil))
    assert len(found) > 100
    assert all(re.search(f"Chatml {message.replace('user', '.*')}", each) for each in found)


def test_the_difference_is_readable() -> None:
    lines = compared(lambda tokenizer: Chatml(tokenizer, lambda ids: ids[:-1]))[0].splitlines()
    assert lines[1].startswith("  template: [")
    assert lines[1].endswith("sistant\\n'")
    assert lines[2].startswith("  renderer: [")
    assert lines[2].endswith("sistant'")


def test_a_renderer_that_lets_content_spell_control_tokens_differs() -> None:
    found = compared(lambda _: Chatml(shared()))  # uses its own tokenizer
    assert found
    assert all(each.startswith(("a question '</", "a result '</", "a question '<", "a result '<")) for each in found)
    assert compared(lambda _: Chatml(shared()), content_tokens="as-template") == []


def test_a_template_without_closers_bridges_from_the_opener() -> None:
    template, tokenizer = zoo.template("glm4moe"), zoo.tokenizer("glm4moe")
    bridged: list[Any] = []

    class Spy:
        def bridge_to_next_turn(self, prompt: Any, completion: Any, new: Any, *, tools: Any = None) -> None:
            bridged.append((tokenizer.decode(prompt), tokenizer.decode(completion)))

    found = list(RendererComparison.of(lambda _: Spy(), tokenizer, template).differences())
    assert "Spy cannot extend a turn" in found[0]
    assert bridged[0][1] == "<|user|>"


def test_the_renderer_tokenizer_is_inert_and_otherwise_equal() -> None:
    template = ChatTemplate.of(shared())
    inert = RendererTokenizer(shared(), template.encoder)
    assert inert.eos_token_id == shared().eos_token_id
    assert inert.encode("the door") == shared().encode("the door", add_special_tokens=False)
    assert set(inert.encode("<|im_end|><think>")).isdisjoint(template.encoder.control_ids)
    assert inert("<|im_end|>")["input_ids"] == inert.encode("<|im_end|>")
    with pytest.raises(NotImplementedError):
        inert("a", return_offsets_mapping=True)


def test_plain_values_have_no_spans() -> None:
    traced: Any = {Traced.content("a", 0): [Traced.content("b", 0), 1, None, ("c",)]}
    copied = plain(traced)
    assert copied == {"a": ["b", 1, None, ["c"]]}
    assert [type(text) for text in (*copied, copied["a"][0])] == [str, str]


@pytest.mark.parametrize("name", PAIRS)
def test_the_packages_renderers_give_the_templates_deltas(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    comparison = RendererComparison.of(PAIRS[name], tokenizer, ChatTemplate.of(tokenizer))
    assert comparison.name.startswith("renderers 0.1.")
    assert list(comparison.differences()) == []
    random, strings = Random(0), controls(comparison.template)
    [called] = calls(("look", {"at": "x"}))
    for _ in range(20):
        text = attack(random, strings).encode("utf-8", "replace").decode()
        assert comparison.difference(called, [results(text)], [LOOK]) is None


def test_template_arguments_reach_the_packages_renderer() -> None:
    tokenizer = zoo.tokenizer("qwen3")

    def compare(**options: Any) -> list[str]:
        return list(RendererComparison.of("qwen3", tokenizer, ChatTemplate.of(tokenizer, **options)).differences())

    assert compare(content_tokens="as-template", enable_thinking=False) == []
    assert (
        "Qwen3Renderer differs from the chat template" in compare(enable_thinking=False)[0]
    )  # its tokenizer matches <think> in content
    with pytest.raises(TemplateError, match=r"'qwen3' .*Unsupported chat_template"):
        compare(unheard_of=1)


@pytest.mark.parametrize(
    ("chosen", "why"),
    [("qwen4", "qwen4"), ("qwen3", "Special token '<.*' not found"), ("auto", "has none for the name")],
)
def test_an_unknown_or_unfit_renderer_is_refused(chosen: str, why: str) -> None:
    tokenizer = byte_level((), CHATML_TOOLS)
    with pytest.raises(TemplateError, match=f"(?s)'{chosen}' .*{why}"):
        RendererComparison.of(chosen, tokenizer, ChatTemplate.of(tokenizer))


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(TemplateError, match=r"pip install '\.\[renderers\]'"):
        RendererComparison.of("qwen3", shared(), ChatTemplate.of(shared()))
