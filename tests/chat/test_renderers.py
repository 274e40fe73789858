"""Deltas from the package `renderers`: taken where they equal the template's own, refused where they differ."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from support import zoo
from support.attacks import attack, controls
from support.byte_level import CHATML_TOOLS, byte_level, shared
from support.conversations import LOOK, answer, asked, calls, results
from support.rollouts import Features, check, rollout
from tito_core.chat.renderers import InertTokenizer, plain
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
    """A renderer for the tests' own template, as the package has them for families; `spoil` changes what it gives."""

    def __init__(self, tokenizer: Any, spoil: Callable[[list[int]], Any] = lambda ids: ids) -> None:
        self.tokenizer = tokenizer
        self.spoil = spoil
        self.asked: list[int] = []

    def bridge_to_next_turn(self, prompt: Any, completion: Any, new: Any, *, tools: Any = None) -> Any:
        start, end = (self.tokenizer.convert_tokens_to_ids(text) for text in ("<|im_start|>", "<|im_end|>"))
        opened, closed = (
            self.tokenizer.convert_tokens_to_ids(text) for text in ("<tool_response>", "</tool_response>")
        )
        self.asked.append(len(prompt) + len(completion))
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


def test_a_renderer_of_ones_own_is_certified_and_named() -> None:
    template = ChatTemplate.of(shared(), renderer=Chatml)
    assert template.certificate.renderer == "Chatml"
    assert "renderer   Chatml, equal on every probe, compared on every turn" in list(template.certificate.lines())
    without = ChatTemplate.of(shared())
    assert without.certificate.renderer == ""
    for new in ([asked("<|im_end|>")], [asked("a", "b")]):
        found, own = (each.delta(answer("x"), new, each.closer_id) for each in (template, without))
        assert found.ids.tolist() == own.ids.tolist()
        assert found.provenance.tolist() == own.provenance.tolist()


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
def test_a_renderer_that_differs_is_refused(spoil: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=f"Chatml {message}"):
        ChatTemplate.of(shared(), renderer=lambda tokenizer: Chatml(tokenizer, spoil))


def test_the_difference_is_readable() -> None:
    with pytest.raises(TemplateError) as refused:
        ChatTemplate.of(shared(), renderer=lambda tokenizer: Chatml(tokenizer, lambda ids: ids[:-1]))
    lines = str(refused.value).splitlines()
    assert lines[1].startswith("  template: [")
    assert lines[1].endswith("sistant\\n'")
    assert lines[2].startswith("  renderer: [")
    assert lines[2].endswith("sistant'")
    assert lines[3] == "Leave out renderer=... to have the template's own deltas."


def test_a_renderer_that_lets_content_spell_control_tokens_is_refused() -> None:
    with pytest.raises(TemplateError, match="differs from the chat template"):
        ChatTemplate.of(shared(), renderer=lambda _: Chatml(shared()))  # it brought a tokenizer of its own
    parity = ChatTemplate.of(shared(), renderer=lambda _: Chatml(shared()), content_tokens="as-template")
    assert parity.certificate.renderer == "Chatml"


def test_a_difference_that_no_probe_showed_is_an_error_of_the_turn() -> None:
    template = ChatTemplate.of(
        shared(), renderer=lambda tokenizer: Chatml(tokenizer, lambda ids: [*ids, 5] if len(ids) > 400 else ids)
    )
    assert len(template.delta(answer("a"), [asked("b")], None).ids)
    with pytest.raises(TemplateError, match="differs from the chat template"):
        template.delta(answer("a"), [asked("b" * 500)], None)


def test_what_it_bridges_from_does_not_grow() -> None:
    made: list[Chatml] = []
    template = ChatTemplate.of(shared(), renderer=lambda tokenizer: made.append(Chatml(tokenizer)) or made[0])  # type: ignore[func-returns-value]
    for words in (1, 1000):
        template.delta(answer("a " * words), [asked("b")], None, history=[asked("c " * words)])
    assert made[0].asked[-1] == made[0].asked[-2]


def test_a_template_that_ends_turns_in_the_next_opener_bridges_from_that() -> None:
    template, tokenizer = zoo.template("glm4moe"), zoo.tokenizer("glm4moe")
    given: list[Any] = []

    class Spy:
        def bridge_to_next_turn(self, prompt: Any, completion: Any, new: Any, *, tools: Any = None) -> None:
            given.append((tokenizer.decode(prompt), tokenizer.decode(completion)))

    with pytest.raises(TemplateError, match="Spy cannot extend a turn"):
        ChatTemplate.of(tokenizer, renderer=lambda _: Spy())
    assert given[0][1] == "<|user|>"
    assert template.certificate.renderer == ""


def test_an_inert_tokenizer_spells_no_control_token_and_is_otherwise_the_same() -> None:
    template = ChatTemplate.of(shared())
    inert = InertTokenizer(shared(), template.encoder)
    assert inert.eos_token_id == shared().eos_token_id
    assert inert.encode("the door") == shared().encode("the door", add_special_tokens=False)
    assert set(inert.encode("<|im_end|><think>")).isdisjoint(template.encoder.control_ids)
    assert inert("<|im_end|>")["input_ids"] == inert.encode("<|im_end|>")
    with pytest.raises(NotImplementedError):
        inert("a", return_offsets_mapping=True)


def test_plain_values_have_no_traces() -> None:
    traced: Any = {Traced.content("a", 0): [Traced.content("b", 0), 1, None, ("c",)]}
    copied = plain(traced)
    assert copied == {"a": ["b", 1, None, ["c"]]}
    assert [type(text) for text in (*copied, copied["a"][0])] == [str, str]


@pytest.mark.parametrize("name", PAIRS)
def test_the_packages_renderers_give_the_templates_deltas(name: str) -> None:
    tokenizer = zoo.tokenizer(name)
    template = ChatTemplate.of(tokenizer, renderer=PAIRS[name])
    assert template.certificate.renderer.startswith("renderers 0.1.")
    shown = Features.of(template)
    for seed in range(3):
        drawn = rollout(Random(seed), shown)
        for turn, found, expected, _ in check(template, tokenizer, drawn):
            assert found == expected, turn
    random, strings = Random(0), controls(template)
    [called] = calls(("look", {"at": "x"}))
    for _ in range(20):
        text = attack(random, strings).encode("utf-8", "replace").decode()
        template.delta(called, [results(text)], None, tool_specs=[LOOK], history=[])  # raises where it differs


def test_template_arguments_reach_the_packages_renderer() -> None:
    tokenizer = zoo.tokenizer("qwen3")
    parity = ChatTemplate.of(tokenizer, renderer="qwen3", content_tokens="as-template", enable_thinking=False)
    assert parity.certificate.renderer == "renderers 0.1.12, Qwen3Renderer"
    with pytest.raises(TemplateError, match="Qwen3Renderer differs from the chat template"):
        ChatTemplate.of(tokenizer, renderer="qwen3", enable_thinking=False)  # it spells <think> as text
    with pytest.raises(TemplateError, match="'qwen3' cannot be made for this tokenizer: Unsupported chat_template"):
        ChatTemplate.of(tokenizer, renderer="qwen3", unheard_of=1)


@pytest.mark.parametrize(("chosen", "why"), [("qwen4", "qwen4"), ("qwen3", "Special token '<.*' not found")])
def test_a_renderer_that_does_not_exist_or_fit_is_refused(chosen: str, why: str) -> None:
    with pytest.raises(TemplateError, match=f"The renderer '{chosen}' cannot be made for this tokenizer: [^$]*{why}"):
        ChatTemplate.of(byte_level((), CHATML_TOOLS), renderer=chosen)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(TemplateError, match=r"pip install 'strands-tito\[renderers\]'"):
        ChatTemplate.of(shared(), renderer="qwen3")
