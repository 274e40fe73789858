"""The probe conversations: their content, and their coverage of every shape in every place."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from tito_core.chat.ending import Opened
from tito_core.chat.images import RESULT, USER, count_images, image_cases
from tito_core.chat.message_check import check_messages
from tito_core.chat.probes import (
    BEFORE,
    DEEPER,
    SYSTEM,
    TOOLS,
    TURNS,
    USUAL,
    assistant_message,
    call_message,
    cases,
    result_message,
    user_message,
)

CASES = {case.name: case for case in cases()}
TEXT: dict[str, Any] = {"text": "t"}
THOUGHT: dict[str, Any] = {"reasoningContent": {"reasoningText": {"text": "h"}}}


def use(index: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"toolUse": {"toolUseId": f"call_{index}", "name": name, "input": arguments}}


def shown(index: int, status: str, blocks: Any) -> dict[str, Any]:
    return {"toolResult": {"toolUseId": f"call_{index}", "status": status, "content": blocks}}


def test_messages_are_as_strands_stores_them() -> None:
    assert user_message("a", "b") == {"role": "user", "content": [{"text": "a"}, {"text": "b"}]}
    assert assistant_message("t", "h") == {"role": "assistant", "content": [THOUGHT, TEXT]}
    assert assistant_message("t") == {"role": "assistant", "content": [TEXT]}
    assert assistant_message("", "h") == {"role": "assistant", "content": [THOUGHT]}
    assert assistant_message() == {"role": "assistant", "content": [{"text": "Seen it."}]}
    assert call_message(("f", {"k": 1}), ("g", {}), text="t", thought="h") == {
        "role": "assistant",
        "content": [THOUGHT, TEXT, use(0, "f", {"k": 1}), use(1, "g", {})],
    }
    assert call_message(("f", {})) == {"role": "assistant", "content": [use(0, "f", {})]}
    assert result_message([TEXT], [], status="error", text="t") == {
        "role": "user",
        "content": [shown(0, "error", [TEXT]), shown(1, "error", []), TEXT],
    }
    assert result_message([]) == {"role": "user", "content": [shown(0, "success", [])]}
    assert call_message(("f", {}), ("g", {}), first=3)["content"] == [use(3, "f", {}), use(4, "g", {})]
    assert result_message([TEXT], [], first=3)["content"] == [shown(3, "success", [TEXT]), shown(4, "success", [])]


def uses(message: Any) -> list[Any]:
    return [block["toolUse"] for block in message["content"] if "toolUse" in block]


def test_every_turn_is_probed_in_every_place() -> None:
    deeper = len(USUAL) * len(DEEPER) * 2
    assert len(CASES) == len(list(cases())) == len(TURNS) * (len(BEFORE) + 3) + deeper
    for answer in TURNS:
        openings = [
            f"{answer}, first{system}{tools}"
            for system in ("", ", with a system prompt")
            for tools in ("", ", with tools")
        ]
        assert [name for name in CASES if name.startswith(f"{answer}, first")] == openings
        for place in {**BEFORE, **(DEEPER if answer in USUAL else {})}:
            if place != "first":
                systems = ["", ", with a system prompt"] if place in DEEPER else [""]
                for system in systems:
                    name = f"{answer}, {place}{system}"
                    assert (name in CASES) != (f"{name}, with tools" in CASES)


def test_the_deeper_places_have_several_rounds_or_answers() -> None:
    def rounds(place: str) -> int:
        return sum(bool(uses(message)) for message in CASES[place].before)

    assert rounds("result, in the third round, with tools") == 2
    assert rounds("result, in the fourth round, with tools") == 3
    assert rounds("two results, after two rounds and answers, with tools") == 2
    assert rounds("question, after two answers") == 0
    assert sum(message["role"] == "assistant" for message in CASES["question, after two answers"].before) == 2
    [_, two, _] = CASES["result, after a round of two calls, with tools"].before
    assert len(uses(two)) == 2


def texts(value: Any) -> list[str]:
    """Return each string that a template may show as content: texts, reasoning and call arguments."""
    if isinstance(value, dict):
        shown = [value[key] for key in ("text", "at") if isinstance(value.get(key), str)]
        return [*shown, *(text for item in value.values() for text in texts(item))]
    return [text for item in value for text in texts(item)] if isinstance(value, list) else []


def test_roles_alternate_except_in_the_two_questions_probe() -> None:
    for name, case in CASES.items():
        roles = [message["role"] for message in case.history]
        assert roles[0] == "user"
        pairs = [pair for pair in pairwise(roles) if pair[0] == pair[1]]
        assert pairs == [("user", "user")] * name.startswith("two questions")


def test_names_state_the_system_prompt_and_tools() -> None:
    for name, case in CASES.items():
        assert (case.system == SYSTEM) == ("with a system prompt" in name)
        assert (case.tools == TOOLS) == name.endswith("with tools")
        assert case.system in (None, SYSTEM)
        assert case.tools in (None, TOOLS)


def test_probes_with_calls_have_tools() -> None:
    for name, case in CASES.items():
        assert case.calls == bool(uses(case.answer))
        if ", first" not in name:
            assert name.endswith("with tools") == any(map(uses, [*case.before, case.answer]))


def test_truncated_probes_state_the_open_part() -> None:
    opened = Counter(case.opened for case in CASES.values())
    each = len(BEFORE) + 3
    assert opened == {None: len(CASES) - 2 * each, Opened.MESSAGE: each, Opened.REASONING: each}
    assert CASES["question after a cut thought, first"].opened == Opened.REASONING
    assert CASES["question after a cut answer, first, with tools"].opened == Opened.MESSAGE


def test_a_remark_is_the_text_with_calls() -> None:
    for case in CASES.values():
        texts = [block["text"] for block in case.answer["content"] if "text" in block]
        assert case.remark == (texts[0] if texts and case.calls else "")
    assert {case.name.split(",")[0] for case in CASES.values() if case.remark} == {
        "result after a remark",
        "result after a thought and a remark",
    }


def ids_of(history: Any, kind: str) -> list[str]:
    return [block[kind]["toolUseId"] for m in history for block in m["content"] if kind in block]


def test_calls_are_numbered_from_zero_and_answered_once_each() -> None:
    for name, case in CASES.items():
        calls, results = ids_of(case.history, "toolUse"), ids_of(case.history, "toolResult")
        assert calls == [f"call_{i}" for i in range(len(calls))]
        turned = name.startswith("two results in another order")
        assert results == ([*calls[:-2], calls[-1], calls[-2]] if turned else calls)


def test_texts_are_numbered_from_one_and_reasoning_says_the_same_everywhere() -> None:
    for case in CASES.values():
        numbers = sorted(map(int, re.findall(r"\bn(\d{3})\b", json.dumps(case.history))))
        assert numbers[0] == 1
        assert len(set(numbers)) == len(numbers) >= numbers[-1] - 1  # a call with odd arguments takes two
        assert all(len(re.findall(r"n\d{3}", text)) == 1 for text in texts(case.history) if text)
        for message in case.history:
            for block in message["content"]:
                if "reasoningContent" in block:
                    assert re.fullmatch(r"Hm n\d{3}\.", block["reasoningContent"]["reasoningText"]["text"])


@pytest.mark.parametrize("place", [USER, RESULT])
def test_probes_of_images_are_valid_messages_in_turn(place: str) -> None:
    made = list(image_cases(place))
    assert len({case.name for case in made}) == len(made)
    for case in made:
        check_messages(case.history)
        roles = [message["role"] for message in case.history]
        assert roles[-1] == "user"
        assert {message["role"] for message in case.new} == {"user"}
        assert set(roles) == {"user", "assistant"}
        assert count_images(case.new) > 0
        calls, results = ids_of(case.history, "toolUse"), ids_of(case.history, "toolResult")
        assert calls == results
        assert len(set(calls)) == len(calls)
        assert (len(calls) > 0) == (place == RESULT)
