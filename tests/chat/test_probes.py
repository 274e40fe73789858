"""The conversations by which templates are certified: what each holds, and that they are every shape in every place."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tito_core.chat.ending import Opened
from tito_core.chat.probes import ANSWERS, BEFORE, SYSTEM, TOOLS, asked, called, cases, returned, said

CASES = {case.name: case for case in cases()}
TEXT: dict[str, Any] = {"text": "t"}
THOUGHT: dict[str, Any] = {"reasoningContent": {"reasoningText": {"text": "h"}}}


def use(index: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"toolUse": {"toolUseId": f"call_{index}", "name": name, "input": arguments}}


def shown(index: int, status: str, blocks: Any) -> dict[str, Any]:
    return {"toolResult": {"toolUseId": f"call_{index}", "status": status, "content": blocks}}


def test_messages_are_as_strands_stores_them() -> None:
    assert asked("a", "b") == {"role": "user", "content": [{"text": "a"}, {"text": "b"}]}
    assert said("t", "h") == {"role": "assistant", "content": [THOUGHT, TEXT]}
    assert said("t") == {"role": "assistant", "content": [TEXT]}
    assert said("", "h") == {"role": "assistant", "content": [THOUGHT]}
    assert said() == {"role": "assistant", "content": [{"text": "Seen it."}]}
    assert called(("f", {"k": 1}), ("g", {}), text="t", thought="h") == {
        "role": "assistant",
        "content": [THOUGHT, TEXT, use(0, "f", {"k": 1}), use(1, "g", {})],
    }
    assert called(("f", {})) == {"role": "assistant", "content": [use(0, "f", {})]}
    assert returned([TEXT], [], status="error", text="t") == {
        "role": "user",
        "content": [shown(0, "error", [TEXT]), shown(1, "error", []), TEXT],
    }
    assert returned([]) == {"role": "user", "content": [shown(0, "success", [])]}


def test_every_answer_is_tried_in_every_place_and_with_every_opening_in_the_first() -> None:
    assert len(CASES) == len(list(cases())) == 136 == len(ANSWERS) * (len(BEFORE) + 3)
    for answer in ANSWERS:
        openings = [
            f"{answer}, first{system}{tools}"
            for system in ("", ", with a system prompt")
            for tools in ("", ", with tools")
        ]
        assert [name for name in CASES if name.startswith(f"{answer}, first")] == openings
        for place in BEFORE:
            [*_, name] = [name for name in CASES if name.startswith(f"{answer}, {place}")]
            assert CASES[name].before == BEFORE[place]
            assert (CASES[name].answered, CASES[name].new, CASES[name].beside) == ANSWERS[answer]


def test_a_name_says_what_the_prompt_opens_with() -> None:
    for name, case in CASES.items():
        assert (case.system == SYSTEM) == ("with a system prompt" in name)
        assert (case.tools == TOOLS) == name.endswith("with tools")
        assert case.system in (None, SYSTEM)
        assert case.tools in (None, TOOLS)


def test_tools_are_shown_wherever_one_is_called_but_in_the_first_place() -> None:
    for name, case in CASES.items():
        history = [*case.before, case.answered]
        calls = any("toolUse" in block for message in history for block in message["content"])
        assert case.calls == any("toolUse" in block for block in case.answered["content"])
        if case.before != BEFORE["first"]:
            assert name.endswith("with tools") == calls


def test_turns_that_were_cut_off_say_what_they_left_open() -> None:
    opened = Counter(case.opened for case in CASES.values())
    assert opened == {None: 136 - 16, Opened.MESSAGE: 8, Opened.REASONING: 8}
    assert CASES["question after a cut thought, first"].opened == Opened.REASONING
    assert CASES["question after a cut answer, first, with tools"].opened == Opened.MESSAGE
    assert {case.name.split(",")[0] for case in CASES.values() if case.beside} == {"result after a remark"}
