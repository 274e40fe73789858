"""Words of earlier content that switch a template: found in its source, probed, and followed by right deltas."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support import corpora, corpus_tokenizers
from support.budget import PROVE, examples
from support.byte_level import CHATML_TOOLS, byte_level
from support.conversations import answer, calls, results, user
from support.plain_referee import judge
from tito_core.chat.certify import Certificate
from tito_core.chat.delta import Switches
from tito_core.chat.probes import LOOK
from tito_core.chat.switches import compared_literals
from tito_core.chat.template import ChatTemplate, TemplateError

ENDING = "{%- if add_generation_prompt -%}{{- '' if ns.on else '<think></think>' -}}{%- endif -%}"
SEES = "{%- set ns = namespace(on=true, count=0) -%}{%- for m in messages -%}"
OFF = "{%- set ns.on = false -%}"


def switched(body: str, before: str = "") -> str:
    """Return a template whose generation prompt depends on a namespace that `body` sets for each message."""
    return before + SEES + body + "{%- endfor -%}" + CHATML_TOOLS + ENDING


def when(condition: str, then: str = OFF) -> str:
    return "{%- if " + condition + " -%}" + then + "{%- endif -%}"


USER = "m.role == 'user' and "
TOGGLE = (
    "{%- if " + USER + "'/quiet' in m.content -%}" + OFF + "{%- elif " + USER + "'/loud' in m.content -%}"
    "{%- set ns.on = true -%}{%- endif -%}"
)
LAST_USER = "{%- if m.role == 'user' -%}{%- set ns.on = '/quiet' not in m.content -%}{%- endif -%}"
SYSTEM = when("m.role == 'system' and '/quiet' in m.content")
QUIET = ("/quiet",)
TEMPLATES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], bool]] = {
    "in a user message": (switched(when(USER + "'/quiet' in m.content")), (), QUIET, False),
    "two words, the later one counts": (switched(TOGGLE), (), ("/quiet", "/loud"), False),
    "in the last user message": (switched(LAST_USER), (), QUIET, True),
    "in any message": (switched(when("'/quiet' in m.content")), QUIET, QUIET, False),
    "in the system prompt": (switched(SYSTEM), QUIET, (), False),
    "in the system prompt, and back in a message": (
        switched(SYSTEM + when(USER + "'/loud' in m.content", "{%- set ns.on = true -%}")), QUIET, ("/loud",), False,
    ),
    "equal": (switched(when(USER + "m.content == '/quiet'")), (), QUIET, False),
    "through a macro": (
        switched(
            when(USER + "holds(m.content, '/qu' ~ 'iet')"),
            "{%- macro holds(text, word) -%}{{- 'yes' if word in text -}}{%- endmacro -%}",
        ),
        (), QUIET, False,
    ),
    "from a list": (switched(when(USER + "m.content.split()|select('in', ['/quiet', '/hush'])|list")), (),
                    ("/quiet", "/hush"), False),
    "in a result": (switched(when("m.role == 'tool' and '/quiet' in m.content")), (), QUIET, False),
    "in an answer": (switched(when("m.role == 'assistant' and '/quiet' in m.content")), (), QUIET, False),
    "in two results in a row": (
        switched(
            "{%- if m.role == 'tool' -%}{%- set ns.count = ns.count + 1 if '/quiet' in m.content else 0 -%}"
            + when("ns.count > 1") + "{%- endif -%}"
        ), (), QUIET, False,
    ),
}  # fmt: skip
"""Templates with their switch words in the system prompt and in messages, and whether these need the whole history."""


def made_of(source: str, **arguments: Any) -> ChatTemplate:
    return ChatTemplate.of(byte_level(template=source), **arguments)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_switch_word_is_found_and_followed_by_right_deltas(name: str) -> None:
    source, system, messages, whole_history = TEMPLATES[name]
    tokenizer = byte_level(template=source)
    made = ChatTemplate.of(tokenizer)
    certificate = made.certificate
    assert (set(certificate.system_switches), set(certificate.switches)) == (set(system), set(messages))
    assert certificate.whole_history is whole_history
    assert any("/quiet" in probe for probe in certificate.passed)
    seeds = (f"{name} {seed}" for seed in range(examples(12)))
    verdict = judge(made, tokenizer, seeds, words=("/quiet", "/loud", "/hush"))
    assert not verdict.differences, "\n".join(map(str, verdict.differences))
    assert verdict.tails


SWITCHED = (
    "hub/NVIDIA-Nemotron-Nano-v2", "hub/HuggingFaceTB-SmolLM3-3B", *(name for name in corpora.names() if PROVE),
)  # fmt: skip
WORDS = ("/no_think", "/think", "<|think_off|>", "<|think_on|>", "/nothink", "/system_override")


@pytest.mark.parametrize("name", SWITCHED)
def test_templates_of_others_are_right_after_their_switch_words(name: str) -> None:
    tokenizer = corpus_tokenizers.tokenizer(name, corpora.template(name))
    try:
        made = ChatTemplate.of(tokenizer)
    except TemplateError:
        return  # test_corpora tells which ones are refused
    certificate = made.certificate
    named = {word for word in WORDS if word in corpora.template(name)}
    words = {*named, *certificate.switches, *certificate.system_switches} - made.encoder.added.keys()  # law 6 differs
    if name in SWITCHED[:2]:
        assert "/no_think" in certificate.system_switches
    verdict = judge(made, tokenizer, (f"{name} {seed}" for seed in range(examples(10))), words=sorted(words))
    assert not verdict.differences, "\n".join(map(str, verdict.differences))


def test_a_template_without_switch_words_renders_no_history() -> None:
    made = made_of(CHATML_TOOLS)
    assert made.deltas.switches is None
    assert made.certificate.switches == made.certificate.system_switches == ()
    assert not any("switches" in line for line in made.certificate.lines())


def test_the_certificate_names_the_words() -> None:
    made = made_of(TEMPLATES["in the system prompt, and back in a message"][0])
    lines = [line for line in made.certificate.lines() if line.startswith("switches")]
    assert re.search("'/quiet' in the system prompt: .* own system prompt", lines[0])
    assert re.search("'/loud' in messages: .* history up to the last one", lines[1])
    assert Certificate.from_json(made.certificate.to_json()) == made.certificate


def test_a_cached_certificate_keeps_the_words() -> None:
    tokenizer = byte_level(template=TEMPLATES["two words, the later one counts"][0])
    for _ in range(2):
        made = ChatTemplate.of(tokenizer)
        assert made.deltas.switches is not None
        assert set(made.deltas.switches.messages) == {"/quiet", "/loud"}
        text = made.tail(answer("a"), [user("b")], history=[user("x /QUIET")], tool_specs=[])
        assert not text.endswith("<think></think>")  # the template compares the case too, so the whole text decides
        assert made.tail(answer("a"), [user("b")], history=[user("x /quiet")], tool_specs=[]).endswith("</think>")


def test_a_delta_of_a_template_with_switch_words_needs_the_history() -> None:
    made = made_of(TEMPLATES["in a user message"][0])
    with pytest.raises(TemplateError, match="pass history="):
        made.delta(answer("a"), [user("b")], None)


def test_only_the_history_up_to_the_last_word_is_rendered() -> None:
    made = made_of(TEMPLATES["in a user message"][0])
    later = [part for i in range(9) for part in (answer(f"Long {i}."), user(f"Later {i}."))]
    [tail] = [made.deltas.tail(answer("a"), [user("b")], (), [user("x /quiet"), *later])]
    assert "/quiet" in tail.text
    assert "Later" not in tail.text
    usual = made.deltas.tail(answer("a"), [user("b")], (), [user("x"), *later])
    assert "x" not in str(usual.text).split("<|im_end|>")[0].removeprefix("<|im_start|>user")


@pytest.mark.parametrize(
    ("history", "spoken", "needed"),
    [
        ([user("a"), answer("b"), user("c")], "d", 0),
        ([user("!"), answer("b"), user("c")], "d", 1),
        ([user("a"), answer("!"), user("c")], "d", 3),
        ([user("a"), *calls(("look", {"at": "!"})), results("c"), answer("d"), user("e")], "f", 3),
        ([user("a"), *calls(("look", {"!": 1})), results("c"), answer("d"), user("e")], "f", 3),
        ([user("a"), *calls(("look", {})), results("!"), answer("d"), user("e")], "f", 3),
        ([user("a"), *calls(("look", {})), results({"k": ["!"]}), answer("d"), user("e")], "f", 3),
        ([user("a"), answer("b", reasoning="!"), user("c"), answer("d"), user("e")], "f", 3),
        ([user("a"), answer("b"), user("c")], "!", 1),
        ([], "!", 0),
    ],
)
def test_the_history_needed_ends_with_the_last_word_and_its_reply(history: Any, spoken: str, needed: int) -> None:
    assert Switches((), ("!",)).needed(history, answer(spoken)) == needed
    assert Switches((), ("!",), whole_history=True).needed(history, answer(spoken)) == (len(history) if needed else 0)
    assert Switches(("!",)).needed(history, answer(spoken)) == 0


def test_literals_that_are_only_written_are_not_tried() -> None:
    source = (
        "{{- 'written' ~ ('also' if a == 'compared' else 'so') -}}{%- set b = 'kept' -%}{{- m['key'] -}}"
        "{{- raise_exception('no ' + 'good') if c.d('called') -}}{{ 'x'|replace('filtered', b) }}"
    )
    found = compared_literals(source, {"eos_token": "<end>", "flag": True})
    assert set(found) == {"compared", "kept", "called", "x", "filtered", "<end>"}


def test_the_words_of_template_arguments_are_tried() -> None:
    source = switched(when(USER + "trigger in m.content"))
    made = ChatTemplate.of(byte_level(template=source), trigger="/mine")
    assert made.certificate.switches == ("/mine",)
    assert made.tail(answer("a"), [user("b")], history=[user("x /mine")], tool_specs=[LOOK]).endswith("</think>")
