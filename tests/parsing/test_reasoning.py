"""Every format of reasoning works with every format of calls."""

from __future__ import annotations

import pytest

from parsing.families import CALL_FAMILIES, NAMES
from support.byte_level import byte_level
from tito_core.parsing import UnknownParserError, get_tool_parser
from tito_core.parsing.turn import REASONING, THOUGHT_CHANNEL

TAGS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt_oss"])
@pytest.mark.parametrize("reasoning", sorted(REASONING))
@pytest.mark.parametrize("by_token", [True, False])
def test_any_reasoning_goes_with_any_calls(name: str, reasoning: str, by_token: bool) -> None:
    family, tags = CALL_FAMILIES[name], REASONING[reasoning]
    tokenizer = byte_level(tuple(dict.fromkeys((*family.control, *TAGS))) if by_token else ())
    opened, closed = (tags.open + tags.label, tags.close) if tags else ("", "")
    draft = family.render([("draft", {"at": "y"})])
    completion = f"{opened}Hm. {draft}\n{closed}" if tags else ""
    ids = tokenizer.encode(completion + family.render([("look", {"at": "x"})]), add_special_tokens=False)
    session = get_tool_parser(name, tokenizer, reasoning).start()
    session.feed(ids)
    turn = session.finish(truncated=False)
    assert [(call.name, call.arguments) for call in turn.calls] == [("look", {"at": "x"})]
    assert (turn.reasoning, turn.text) == (f"Hm. {draft}" if tags else "", "")


def test_a_label_is_removed_only_at_the_start() -> None:
    assert THOUGHT_CHANNEL.text_of("thought\n\nHm.\n") == "Hm."
    assert THOUGHT_CHANNEL.text_of("a thought\nHm.") == "a thought\nHm."


def test_unknown_or_unsupported_reasoning_raises() -> None:
    tokenizer = CALL_FAMILIES["hermes"].tokenizer(True)
    with pytest.raises(UnknownParserError, match=r"'thnk'.*bracket_think, channel, none, think"):
        get_tool_parser("hermes", tokenizer, "thnk")
    with pytest.raises(UnknownParserError, match=r"'gpt_oss'.*reasoning='think'"):
        get_tool_parser("gpt_oss", tokenizer, "think")
