"""What a renderer is asked for each turn, and what is said when it gives something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import renderers

from support.byte_level import shared
from support.conversations import LOOK, answer, asked, calls, results
from support.templates import template_of
from tito_core.chat import renderers as ours
from tito_core.chat.messages import template_tools
from tito_core.chat.renderers import InertTokenizer, RendererSource
from tito_core.chat.template import ChatTemplate, TemplateError

SAME: Callable[[list[int]], Any] = list


class Beside:
    """A renderer that gives the template's own delta, changed by `spoil`, and remembers what it was asked."""

    def __init__(self, delta: list[int], spoil: Callable[[list[int]], Any] = SAME, *, wrapped: bool = False) -> None:
        self.delta = delta
        self.spoil = spoil
        self.wrapped = wrapped
        self.asked: list[tuple[list[int], list[int], Any, Any]] = []

    def bridge_to_next_turn(self, prompt: list[int], completion: list[int], new: Any, *, tools: Any = None) -> Any:
        self.asked.append((prompt, completion, new, tools))
        ids = [*prompt, *completion, *self.spoil(self.delta)]
        return SimpleNamespace(token_ids=ids) if self.wrapped else ids


def beside(spoil: Callable[[list[int]], Any] = SAME, **options: bool) -> tuple[ChatTemplate, Beside, list[int]]:
    """Give the tests' template with a renderer for the turn of ANSWERED and NEW, and that turn's delta."""
    template = template_of("byte level")
    own = template.delta(answer("a"), [asked("b")], template.closer_id).ids.tolist()
    renderer = Beside(own, spoil, **options)
    source = RendererSource("Beside", renderer, template.encoder, shared())
    return replace(template, _renderer=source), renderer, own


def refusal(spoil: Callable[[list[int]], Any]) -> str:
    template, _, _ = beside(spoil)
    with pytest.raises(TemplateError) as refused:
        template.delta(answer("a"), [asked("b")], None)
    return str(refused.value)


def test_a_renderer_extends_a_stand_in_turn_by_the_new_messages() -> None:
    template, renderer, own = beside()
    assert template.delta(answer("a" * 99), [asked("b")], template.closer_id, tool_specs=[LOOK]).ids.tolist() == own
    [(prompt, completion, new, tools)] = renderer.asked
    assert shared().decode(prompt) == "<|im_start|>user\n.<|im_end|>\n<|im_start|>assistant\n."
    assert shared().decode(completion) == "<|im_end|>"
    assert new == [{"role": "user", "content": "b"}]
    assert type(new[0]["content"]) is str
    assert tools == template_tools([LOOK])
    assert type(tools[0]["function"]["name"]) is str


def test_without_tools_a_renderer_is_given_none() -> None:
    template, renderer, _ = beside()
    for specs in (None, []):
        template.delta(answer("a"), [asked("b")], None, tool_specs=specs)
    assert [tools for *_, tools in renderer.asked] == [None, None]


def test_ids_may_come_in_an_object() -> None:
    template, _, own = beside(wrapped=True)
    assert template.delta(answer("a"), [asked("b")], template.closer_id).ids.tolist() == own


def test_a_renderer_that_stops_early_or_goes_on_is_told_from_the_template() -> None:
    ids = beside()[2]
    assert len(ids) == 19
    assert refusal(lambda own: own[:-1]) == (
        "Beside differs from the chat template at token 18 of a delta for messages with roles ['user']:\n"
        f"  template: {ids[12:]} 'sistant\\n'\n"
        f"  renderer: {ids[12:-1]} 'sistant'\n"
        "Leave out renderer=... to have the template's own deltas."
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
def test_a_difference_is_shown_with_a_few_tokens_around_it(at: int, shown: str) -> None:
    ids = beside()[2]
    lines = refusal(lambda own: [*own[:at], 5, *own[at + 1 :]]).splitlines()
    around = slice(max(0, at - 6), at + 6)
    assert lines[0].startswith(f"Beside differs from the chat template at token {at} of a delta")
    assert lines[1] == f"  template: {ids[around]} {shown!r}"
    assert lines[2].startswith(f"  renderer: {[*ids[:at], 5, *ids[at + 1 :]][around]} ")


def test_a_turn_that_cannot_be_extended_names_the_roles_of_what_is_new() -> None:
    template, _, _ = beside()
    message = calls(("look", {"at": "x"}))[0]

    def failing(bridged: Callable[[], Any]) -> str:
        renderer: Any = SimpleNamespace(bridge_to_next_turn=lambda *_, **__: bridged())
        source = RendererSource("Failing", renderer, template.encoder, shared())
        with pytest.raises(TemplateError) as refused:
            replace(template, _renderer=source).delta(message, [results("y"), asked("z")], None)
        return str(refused.value)

    assert failing(lambda: None) == "Failing cannot extend a turn by messages with roles ['tool', 'user']."
    assert failing(lambda: {}["x"]) == "Failing fails to extend a turn: KeyError: 'x'"
    assert failing(lambda: []) == (
        "Failing changes the turn that it extends by messages with roles ['tool', 'user'], which breaks law 1."
    )


def test_a_renderer_gets_a_tokenizer_that_spells_no_control_token_unless_content_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = template_of("byte level").encoder
    given: list[Any] = []

    def make(tokenizer: Any) -> Beside:
        given.append(tokenizer)
        return Beside([])

    for inert in (True, False):
        made = RendererSource.of(make, shared(), encoder, {}, inert=inert)
        assert (made.name, made.encoder, made.tokenizer) == ("Beside", encoder, shared())
    assert type(given[0]) is InertTokenizer
    assert given[1] is shared()
    monkeypatch.setattr(ours, "_by_name", lambda name, tokenizer, arguments: make(tokenizer))
    named = RendererSource.of("beside", shared(), encoder, {}, inert=True)
    assert named.name == f"renderers {version('renderers')}, Beside"


def test_a_renderer_that_cannot_be_made_says_why() -> None:
    def fail(_: Any) -> Any:
        raise AssertionError("no such token")

    with pytest.raises(TemplateError) as refused:
        RendererSource.of(fail, shared(), template_of("byte level").encoder, {}, inert=True)
    assert str(refused.value).startswith("The renderer <function ")
    assert str(refused.value).endswith(" cannot be made for this tokenizer: no such token")


def test_one_of_the_package_keeps_reasoning_and_has_the_rollouts_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(renderers, "create_renderer", lambda *given, **named: made.append((given, named)) or Beside([]))  # type: ignore[func-returns-value]
    source = RendererSource.of(
        "qwen3", shared(), template_of("byte level").encoder, {"enable_thinking": False}, inert=False
    )
    assert source.name.endswith(", Beside")
    [((tokenizer, config), named)] = made
    assert tokenizer is shared()
    assert (config.name, config.thinking_retention) == ("qwen3", "all")
    assert named == {"chat_template_kwargs": {"enable_thinking": False}}


def test_an_inert_tokenizer_says_what_it_does_not_do() -> None:
    inert = InertTokenizer(shared(), template_of("byte level").encoder)
    with pytest.raises(NotImplementedError) as refused:
        inert("a", return_offsets_mapping=True)
    assert str(refused.value) == "This tokenizer gives ids only."
    assert inert("a", return_offsets_mapping=False) == {"input_ids": shared().encode("a", add_special_tokens=False)}
