"""A call that is cut anywhere is closed by the tags that are open there, innermost first, and by no others."""

from __future__ import annotations

import re

import pytest

from parsing.families import CALL_FAMILIES, NAMES, ids_of, parse
from tito_core.parsing import CallStatus

CALLS = [("look", {"at": "x y", "far": 5}), ("count", {"of": "z"})]
TAG = re.compile(r"\]<\]minimax\[>\[<[^<>]*>|<\|open\|>\w+(?:<\|sep\|>| )|<\|close\|>\w+<\|sep\|>|<[^<>\s][^<>]*>")
CLOSES = re.compile(r"</|<\|close\|>|[_▁]end[|｜]|\|END_|^<end_|^<\w+\|>$")
QUOTES = ('<|"|>', "<escape>")
NEUTRAL = re.compile(r"^<\|sep|tool.sep|argument_begin|^<\|(start|message|eom|channel|constrain|call|tool_call)\|>$")


def missing(whole: str, cut: int, *, counts: bool) -> list[str]:
    """Return the closing tags after a cut whose opening tags are before it: those that nothing after the cut opens.

    `counts`: an opening tag with attributes counts where the cut is inside it.
    """
    found: list[str] = []
    depth = quotes = 0
    for tag in TAG.finditer(whole):
        closes = CLOSES.search(tag[0]) is not None
        before = tag.end() <= cut or (counts and not closes and tag.start() < cut)
        if tag[0] in QUOTES:
            quotes += 1
            closes = quotes % 2 == 0
        if before or NEUTRAL.search(tag[0]):
            continue
        if not closes:
            depth += 1
        elif depth:
            depth -= 1
        else:
            found.append(tag[0])
    return found


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_cut_call_lacks_the_closers_of_what_is_open(name: str, by_token: bool) -> None:
    family = CALL_FAMILIES[name]
    calls = CALLS[:1] if family.single_call else CALLS
    whole, shown = family.render(calls), family.tokenizer(by_token)
    ids = ids_of(family, whole, by_token)
    seen = set()
    for cut in range(1, len(ids) + 1):
        turn = parse(family, ids[:cut], calls, by_token=by_token, truncated=True)
        at = len(shown.decode(ids[:cut]))
        expected = [missing(whole, at, counts=counts) for counts in (False, True)]
        assert list(turn.unclosed) in expected, whole[:at]
        assert turn.unclosed or not expected[0] or all(call.status != CallStatus.TRUNCATED for call in turn.calls)
        seen.add(turn.unclosed)
    assert len(seen) > 1 or not missing(whole, whole.index("look"), counts=True)
