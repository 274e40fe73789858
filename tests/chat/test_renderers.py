"""Deltas of the package `renderers`, compared with the template's own: `tito template check --against renderers`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import renderers

from strands_tito.inspect import template_check as ours
from strands_tito.inspect.template_check import SEAMS, RendererComparison, RendererTokenizer, plain
from support import zoo
from support.attacks import attack, controls
from support.byte_level import CHATML_TOOLS, byte_level, shared
from support.conversations import LOOK, answer, calls, results, user
from support.templates import template_of
from tito_core.chat.certify import ContentTokens
from tito_core.chat.messages import template_tools
from tito_core.chat.probes import TOOLS, cases
from tito_core.chat.template import ChatTemplate, TemplateError
from tito_core.chat.traced import Traced

PAIRS = {
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_8": "qwen3.8",
    "llama3_1": "llama-3",
    "nemotron_3_nano": "nemotron-3",
}


def test_a_template_without_closers_bridges_from_the_opener() -> None:
    template, tokenizer = zoo.template("glm4moe"), zoo.tokenizer("glm4moe")
    bridged: list[Any] = []

    class Spy:
        def bridge_to_next_turn(self, prompt: Any, completion: Any, new: Any, *, tools: Any = None) -> None:
            bridged.append((tokenizer.decode(prompt), tokenizer.decode(completion)))

    found = list(RendererComparison.of(lambda _: Spy(), tokenizer, template).differences())
    assert "Spy cannot extend a turn" in found[0]
    assert bridged[0][1] == "<|user|>"


def test_plain_values_have_no_spans() -> None:
    traced: Any = {Traced.content("a", 0): [Traced.content("b", 0), 1, None, ("c",)]}
    copied = plain(traced)
    assert copied == {"a": ["b", 1, None, ["c"]]}
    assert [type(text) for text in (*copied, copied["a"][0])] == [str, str]


@pytest.mark.parametrize("name", PAIRS)
def test_the_packages_renderers_give_the_templates_deltas(name: str) -> None:
    comparison = RendererComparison.of(PAIRS[name], zoo.tokenizer(name), zoo.template(name))
    assert comparison.name.startswith("renderers 0.1.")
    assert list(comparison.differences()) == []
    random, strings = Random(0), controls(comparison.template)
    [called] = calls(("look", {"at": "x"}))
    for _ in range(20):
        text = attack(random, strings).encode("utf-8", "replace").decode()
        assert comparison.difference(called, [results(text)], [LOOK]) is None


def test_template_arguments_reach_the_packages_renderer() -> None:
    tokenizer = zoo.tokenizer("qwen3")

    def first_difference(**options: Any) -> str | None:
        made = ChatTemplate.of(tokenizer, **options)
        return next(iter(RendererComparison.of("qwen3", tokenizer, made).differences()), None)

    assert first_difference(content_tokens="as-template", enable_thinking=False) is None
    found = first_difference(enable_thinking=False)  # its tokenizer matches <think> in content
    assert "Qwen3Renderer differs from the chat template" in str(found)
    made = zoo.template("qwen3")
    unheard_of = replace(made, rendering=replace(made.rendering, variables={**made.arguments, "unheard_of": 1}))
    with pytest.raises(TemplateError, match=r"'qwen3' .*Unsupported chat_template"):
        RendererComparison.of("qwen3", tokenizer, unheard_of)


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
        RendererComparison.of("qwen3", shared(), template_of("byte level"))


SAME: Callable[[list[int]], Any] = list


class Recorder:
    """A renderer that returns the template's own delta, changed by `spoil`, and records its requests."""

    def __init__(self, delta: list[int], spoil: Callable[[list[int]], Any] = SAME, *, wrapped: bool = False) -> None:
        self.delta = delta
        self.spoil = spoil
        self.wrapped = wrapped
        self.requests: list[tuple[list[int], list[int], Any, Any]] = []

    def bridge_to_next_turn(self, prompt: list[int], completion: list[int], new: Any, *, tools: Any = None) -> Any:
        self.requests.append((prompt, completion, new, tools))
        ids = [*prompt, *completion, *self.spoil(self.delta)]
        return SimpleNamespace(token_ids=ids) if self.wrapped else ids


def own_delta(
    spoil: Callable[[list[int]], Any] = SAME, **options: bool
) -> tuple[RendererComparison, Recorder, list[int]]:
    """Return a comparison of a renderer with the tests' template, the renderer, and the template's own delta."""
    template = template_of("byte level")
    own = template.delta(answer("a"), [user("b")], template.closer_id).ids.tolist()
    renderer = Recorder(own, spoil, **options)
    return RendererComparison("Recorder", renderer, template, shared()), renderer, own


def refusal(spoil: Callable[[list[int]], Any]) -> str:
    found = own_delta(spoil)[0].difference(answer("a"), [user("b")])
    assert found is not None
    return found


def test_a_renderer_gets_a_stand_in_turn_and_the_new_messages() -> None:
    comparison, renderer, _ = own_delta()
    assert comparison.difference(answer("a" * 99), [user("b")], [LOOK], [user("c" * 99)]) is None
    [(prompt, completion, new, tools)] = renderer.requests
    assert shared().decode(prompt) == "<|im_start|>user\n.<|im_end|>\n<|im_start|>assistant\n."
    assert shared().decode(completion) == "<|im_end|>"
    assert new == [{"role": "user", "content": "b"}]
    assert type(new[0]["content"]) is str
    assert tools == template_tools([LOOK])
    assert type(tools[0]["function"]["name"]) is str


def test_without_tools_a_renderer_gets_none() -> None:
    comparison, renderer, _ = own_delta()
    for specs in (None, []):
        assert comparison.difference(answer("a"), [user("b")], specs) is None
    assert [tools for *_, tools in renderer.requests] == [None, None]


def test_a_renderer_may_return_an_object_with_ids() -> None:
    assert own_delta(wrapped=True)[0].difference(answer("a"), [user("b")]) is None


def test_shorter_and_longer_deltas_of_a_renderer_are_differences() -> None:
    ids = own_delta()[2]
    assert len(ids) == 19
    assert refusal(lambda own: own[:-1]) == (
        "Recorder differs from the chat template at token 18 of a delta for messages with roles ['user']:\n"
        f"  template: {ids[12:]} 'sistant\\n'\n"
        f"  renderer: {ids[12:-1]} 'sistant'"
    )
    assert refusal(lambda own: [*own, own[0]]).splitlines()[1:3] == [
        f"  template: {ids[13:]} 'istant\\n'",
        f"  renderer: {[*ids[13:], ids[0]]} 'istant\\n\\n'",
    ]


@pytest.mark.parametrize(
    ("at", "shown"),
    [
        (0, "\n<|im_start|>user\n"),
        (1, "\n<|im_start|>user\nb"),
        (2, "\n<|im_start|>user\nb<|im_end|>"),
        (8, "user\nb<|im_end|>\n<|im_start|>assi"),
    ],
)
def test_a_difference_is_shown_with_a_few_tokens_of_context(at: int, shown: str) -> None:
    ids = own_delta()[2]
    lines = refusal(lambda own: [*own[:at], 5, *own[at + 1 :]]).splitlines()
    around = slice(max(0, at - 6), at + 6)
    assert lines[0].startswith(f"Recorder differs from the chat template at token {at} of a delta")
    assert lines[1] == f"  template: {ids[around]} {shown!r}"
    assert lines[2].startswith(f"  renderer: {[*ids[:at], 5, *ids[at + 1 :]][around]} ")


def test_a_turn_that_cannot_be_extended_names_the_new_roles() -> None:
    template = own_delta()[0].template
    message = calls(("look", {"at": "x"}))[0]

    def failing(bridged: Callable[[], Any]) -> str:
        renderer: Any = SimpleNamespace(bridge_to_next_turn=lambda *_, **__: bridged())
        comparison = RendererComparison("Failing", renderer, template, shared())
        return str(comparison.difference(message, [results("y"), user("z")]))

    assert failing(lambda: None) == "Failing cannot extend a turn by messages with roles ['tool', 'user']."
    assert failing(lambda: {}["x"]) == "Failing fails to extend a turn: KeyError: 'x'"
    assert failing(lambda: []) == (
        "Failing changes the turn that it extends by messages with roles ['tool', 'user'], which breaks law 1."
    )


def test_a_renderer_gets_an_inert_tokenizer_unless_content_may_write_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def make(tokenizer: Any) -> Recorder:
        given.append(tokenizer)
        return Recorder([])

    ways: tuple[ContentTokens, ...] = ("inert", "as-template")
    for content_tokens in ways:
        template = ChatTemplate.of(shared(), content_tokens=content_tokens)
        made = RendererComparison.of(make, shared(), template)
        assert (made.name, made.template, made.tokenizer) == ("Recorder", template, shared())
    assert type(given[0]) is RendererTokenizer
    assert given[1] is shared()
    monkeypatch.setattr(ours, "_by_name", lambda name, tokenizer, arguments: make(tokenizer))
    named = RendererComparison.of("recorder", shared(), template_of("byte level"))
    assert named.name == f"renderers {version('renderers')}, Recorder"


def test_a_renderer_that_cannot_be_made_says_why() -> None:
    def fail(_: Any) -> Any:
        raise AssertionError("no such token")

    with pytest.raises(TemplateError) as refused:
        RendererComparison.of(fail, shared(), template_of("byte level"))
    assert str(refused.value).startswith("The renderer <function ")
    assert str(refused.value).endswith(" cannot be made for this tokenizer: no such token")


def test_a_renderer_of_the_package_keeps_reasoning_and_gets_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def create(*given: Any, **named: Any) -> Recorder:
        made.append((given, named))
        return Recorder([])

    monkeypatch.setattr(renderers, "create_renderer", create)
    template = ChatTemplate.of(shared(), content_tokens="as-template", enable_thinking=False)
    source = RendererComparison.of("qwen3", shared(), template)
    assert source.name.endswith(", Recorder")
    [((tokenizer, config), named)] = made
    assert tokenizer is shared()
    assert (config.name, config.thinking_retention) == ("qwen3", "all")
    assert named == {"chat_template_kwargs": {"enable_thinking": False}}


def test_the_renderer_tokenizer_is_inert_and_otherwise_equal() -> None:
    template = template_of("byte level")
    inert = RendererTokenizer(shared(), template.encoder)
    assert inert.eos_token_id == shared().eos_token_id
    assert inert.encode("the door") == shared().encode("the door", add_special_tokens=False)
    assert set(inert.encode("<|im_end|><think>")).isdisjoint(template.encoder.control_ids)
    assert inert("<|im_end|>")["input_ids"] == inert.encode("<|im_end|>")
    with pytest.raises(NotImplementedError) as refused:
        inert("a", return_offsets_mapping=True)
    assert str(refused.value) == "This tokenizer returns ids only."
    assert inert("a", return_offsets_mapping=False) == {"input_ids": shared().encode("a", add_special_tokens=False)}


@pytest.mark.parametrize("tools", [True, False])
def test_passed_probes_and_hostile_content_are_compared(tools: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any, Any, Any]] = []

    def difference(_: Any, answered: Any, new: Any, specs: Any = None, history: Any = None) -> str:
        compared.append((answered, new, specs, history))
        return "different"

    monkeypatch.setattr(RendererComparison, "difference", difference)
    probes = {case.name: case for case in cases()}
    passed = ("question, first", "result, in mid round, with tools")
    stand_in: Any = SimpleNamespace(
        certificate=SimpleNamespace(passed=passed, tools=tools), encoder=SimpleNamespace(added={"<b>": 2, "<a>": 1})
    )
    found = list(RendererComparison("Recorder", Recorder([]), stand_in, shared()).differences())
    assert sorted(compared[:2], key=str) == sorted(
        ((case.answer, case.new, case.tools, case.before) for case in (probes[name] for name in passed)), key=str
    )
    assert [each.split(":")[0] for each in found[:2]] == [name for name in probes if name in passed]
    assert len(found) == len(compared)
    texts = [*SEAMS, "<a> <b>", "<a> <b>\n"]
    assert [new for _, new, *_ in compared[2:] if "text" in new[0]["content"][0]] == [
        [{"role": "user", "content": [{"text": text}]}] for text in texts
    ]
    shown = [new[0]["content"][0]["toolResult"] for _, new, *_ in compared[2:] if "toolResult" in new[0]["content"][0]]
    assert [result["content"] for result in shown] == ([[{"text": text}] for text in texts] if tools else [])
    for answered, new, specs, _ in compared[2:]:
        called = "toolResult" in new[0]["content"][0]
        assert specs == (TOOLS if called else None)
        assert any("toolUse" in block for block in answered["content"]) == called
