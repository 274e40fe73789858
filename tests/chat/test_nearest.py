"""What a template refuses is shown in the nearest form that it takes, so that every answer has a next turn (law 7)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support import corpora, corpus_tokenizers, zoo
from support.budget import PROVE, examples
from support.conversations import LOOK, answer, user
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.chat.template import ChatTemplate, TemplateError

HEADER = "Write <|channel|>analysis<|message|> or <|channel|>final<|message|>."
SIMILAR = HEADER.replace("l|", "1|")
MISTRAL, MINISTRAL = "hub/Mistral-Small-3.2-24B-Instruct-2506", "hub/mistralai-Ministral-3-14B-Instruct-2512"
REFUSING = (
    *("zoo/llama3_1", "zoo/gptoss", MISTRAL, MINISTRAL, "hub/nvidia-Llama-3.1-Nemotron-Nano-8B-v1"),
    "hub/unsloth-functiongemma-270m-it",
)
"""Templates that refuse second calls, answers that spell a header, questions after questions, results in a row, empty
answers or empty results."""
NAMES = [*(f"zoo/{name}" for name in zoo.TOOL_NAMES), *corpora.names(light=False)] if PROVE else REFUSING


def template_of(name: str) -> ChatTemplate:
    if name.startswith("zoo/"):
        return zoo.template(name.removeprefix("zoo/"))
    return ChatTemplate.of(corpus_tokenizers.tokenizer(name, corpora.template(name)))


@st.composite
def turns(draw: Any) -> tuple[Any, list[Any]]:
    """Draw an answer of any shape that parsing makes, and what may follow it; each text of that has a number."""
    said, thought = (draw(st.sampled_from(["", "So.", HEADER])) for _ in range(2))
    content: list[Any] = [{"reasoningContent": {"reasoningText": {"text": thought}}}] if thought else []
    content += [{"text": said}] if said else []
    shown: list[Any] = []
    for number in range(draw(st.integers(0, 3))):
        use, runs = f"call_0000000{number}_1", draw(st.booleans())
        given = ("look", {"at": "it"}) if runs else (MALFORMED_CALL, {"reason": f"n10{number}", "raw": "{"})
        content.append({"toolUse": {"toolUseId": use, "name": given[0], "input": given[1]}})
        seen = draw(st.sampled_from(["", f"n20{number}"]))
        shown.append({"toolResult": {"toolUseId": use, "status": "success", "content": [{"text": seen}]}})
    beside, after = draw(st.booleans()), draw(st.integers(0 if shown else 1, 2))
    new = [{"role": "user", "content": [*shown, *([{"text": "n300"}] if beside else [])]}] if shown else []
    new += [user(f"n40{number}") for number in range(after)]
    return {"role": "assistant", "content": content or [{"text": "[blank text]"}]}, new


def numbers(answered: Any, new: list[Any]) -> list[str]:
    """Return the numbers that the policy has to read, in order."""
    reasons = {}
    for block in answered["content"]:
        if block.get("toolUse", {}).get("name") == MALFORMED_CALL:
            reasons[block["toolUse"]["toolUseId"]] = block["toolUse"]["input"]["reason"]
    texts: list[str] = []
    for block in (block for message in new for block in message["content"]):
        result = block.get("toolResult", {"content": [block]})
        texts += [reasons.get(result.get("toolUseId"), ""), result["content"][0]["text"]]
    return [text for text in texts if text]


EMPTY_RESULT: list[Any] = [
    {"role": "assistant", "content": [{"toolUse": {"toolUseId": "call_00000000_1", "name": "look", "input": {}}}]},
    {"role": "user", "content": [{"toolResult": {"toolUseId": "call_00000000_1", "content": [{"text": ""}]}}]},
]


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_has_a_next_turn_and_so_has_every_edited_history(name: str) -> None:
    try:
        template = template_of(name)
    except TemplateError:
        return  # tests/support/corpora_refused.json says why
    if not template.certificate.tools:
        return  # tests/model/test_refusing_templates.py: no tool runs

    @settings(deadline=None, max_examples=examples(20))
    @given(turns())
    @example((EMPTY_RESULT[0], EMPTY_RESULT[1:]))
    def holds(turn: tuple[Any, list[Any]]) -> None:
        answered, new = turn
        delta = template.delta(answered, new, None, tool_specs=[LOOK], history=[user("Why?")])
        assert re.findall(r"n\d{3}", str(template.encoder.tokenizer.decode(delta.ids.tolist()))) == numbers(*turn)
        history = [user("Why?"), answered, *new]
        compare = template.comparison(history, 2, None, [LOOK], 100, first_delta=True, rendered=delta.text)
        if compare is not None:
            compare()
        edited = [user("Why not?"), answered, *new, answer("Done."), user("n500")]
        whole = template.first_prompt(edited, None, [LOOK]).ids.tolist()
        found = re.findall(r"n\d{3}", str(template.encoder.tokenizer.decode(whole)))
        assert [number for number in found if number[1] != "1"] == [
            number for number in (*numbers(*turn), "n500") if number[1] != "1"
        ]

    holds()


def seen_twice(second: str, *beside: Any) -> list[Any]:
    """Return a question, two calls and their results, with blocks beside these."""
    uses = [{"toolUseId": f"call{number:05}", "name": "look", "input": {"at": "it"}} for number in range(2)]
    seen = [
        {"toolUseId": use["toolUseId"], "status": "success", "content": [{"text": text}]}
        for use, text in zip(uses, ("first", second), strict=True)
    ]
    called = {"role": "assistant", "content": [{"toolUse": use} for use in uses]}
    return [user("a"), called, {"role": "user", "content": [*({"toolResult": each} for each in seen), *beside]}]


@pytest.mark.parametrize(
    ("name", "refused", "taken"),
    [
        (MISTRAL, seen_twice("c", {"text": "b"}), seen_twice("c\n\nb")),
        (MISTRAL, [user("a"), user("b")], [user("a\n\nb")]),
        (MINISTRAL, [user("a"), answer(""), user("b")], [user("a"), answer("[blank text]"), user("b")]),
        ("zoo/gptoss", [user("a"), answer(HEADER), user("b")], [user("a"), answer(SIMILAR), user("b")]),
    ],
)  # fmt: skip
def test_the_nearest_form_is_an_ordinary_conversation(name: str, refused: Any, taken: Any) -> None:
    template = template_of(name)
    decode = template.encoder.tokenizer.decode
    texts = [str(decode(template.first_prompt(each, None, None).ids.tolist())) for each in (refused, taken)]
    assert texts[0] == texts[1].replace(SIMILAR, HEADER)
