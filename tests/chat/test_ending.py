"""Endings of turns, learned from small renderings in which each character has an obvious meaning; missing closers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.byte_level import byte_level
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.ending import (
    THOUGHT,
    Ending,
    Opened,
    Sample,
    inner_controls,
    learn_answers,
    learn_calls,
    share_closers,
    stops_of,
)
from tito_core.chat.traced import Traced, concat

CONTROL = ("<a>", "<q>", "<o>", "<e>", "<f>", "<g>", "<t>", "</t>", "<c>", "</c>")
"""Openers of an answer, a question and a result; closers; markup of reasoning and calls."""
TOKENIZER = byte_level((), "", CONTROL, {"eos_token": "<e>"})
ENCODER = ContentSafeEncoder(TOKENIZER)
ASKED, TURN, NEXT = 0, 1, 2
Runs = tuple[str | tuple[str, int], ...]
SO = ("so", TURN)
HM = (THOUGHT, TURN)


def text(*runs: str | tuple[str, int]) -> Traced:
    """Join scaffold and (content, source) pairs."""
    whole = concat(run if isinstance(run, str) else Traced.content(*run) for run in runs)
    return whole if isinstance(whole, Traced) else Traced.of(whole, ())


def sample(alone: Runs, followed: Runs) -> Sample:
    return Sample(ENCODER, text("<q>", ("Why?", ASKED), *alone), text("<q>", ("Why?", ASKED), *followed), TURN)


def spelled(ids: Any) -> str:
    return "".join(TOKENIZER.decode([index]) for index in ids)


def shown(ending: Ending | None) -> Any:
    """Return an ending as text: closing, finals, openers, and closers by open part."""
    if ending is None:
        return None
    closers = {opened.value: spelled(ids) for opened, ids in ending.closers.items()}
    assert all(ids.dtype == np.int32 for ids in ending.closers.values())
    named = (spelled(sorted(ids)) for ids in (ending.finals, ending.openers))
    return (spelled(ending.closing), *named, closers)


def ids(spelling: str) -> list[int]:
    return [TOKENIZER.convert_tokens_to_ids(token) for token in CONTROL if token in spelling]


CHATML = ("<a>", SO, "<e>\n"), ("<a>", SO, "<e>\n<q>", ("And?", NEXT), "<e>\n<a>")
NEXT_OPENS = ("<a>", SO), ("<a>", SO, "<q>", ("And?", NEXT), "<a>")
LAST_DIFFERS = ("<a>", SO, "<f><c><g>"), ("<a>", SO, "<e><q>", ("And?", NEXT), "<f><a>")


@pytest.mark.parametrize(
    ("alone", "followed", "learned"),
    [
        (*CHATML, ("<e>", "", "", {"message": "<e>"})),
        (
            ("<a>", SO, " <e><f>\n"),
            ("<a>", SO, " <e><f>\n<q>", ("And?", NEXT)),
            ("<e><f>", "", "", {"message": " <e><f>"}),
        ),
        # Three pieces of content, the first of which is quoted by the next message.
        (
            ("<a>", ("x", TURN), ",", ("y", TURN), ",", ("z", TURN), "<e>"),
            ("<a>", ("x", TURN), ",", ("y", TURN), ",", ("z", TURN), "<e><q>", ("x", TURN), "<f><a>"),
            ("<e>", "", "", {"message": "<e>"}),
        ),
        # What comes before the content is written otherwise once another message follows.
        (("<a><t></t>", SO, "<e>\n<f>"), ("<a>", SO, "<e>\n<q>", ("And?", NEXT)), ("<e>", "", "", {"message": "<e>"})),
        (("<a>", SO, "<e>\n"), ("<a><t></t>", SO, "<e>\n<q>", ("And?", NEXT)), ("<e>", "", "", {"message": "<e>"})),
        # Only the opener of the next message ends it.
        (*NEXT_OPENS, ("", "", "<q>", {"message": ""})),
        (("<a>", SO), ("<a>", SO, "\n<q><f>", ("And?", NEXT)), ("", "", "<q>", {"message": "\n"})),
        # The last answer of all ends with another token.
        (*LAST_DIFFERS, ("<e>", "<g>", "", {"message": "<e>"})),
        (("<a>", SO, "<g>"), ("<a>", SO, ".<e><f><q>", ("And?", NEXT)), ("<e>", "<g>", "", {"message": ".<e>"})),
        # The blanks between its tokens are others once another message follows.
        (("<a>", SO, "<e>\n<f>"), ("<a>", SO, "<e><f><q>", ("And?", NEXT)), ("<e><f>", "", "", {"message": "<e><f>"})),
        # The template writes the next opener, whether or not anything follows.
        (("<a>", SO, "<e><q>"), ("<a>", SO, "<e><q>", ("And?", NEXT)), ("<e>", "", "", {"message": "<e>"})),
        (("<a>", SO, "<q><e>"), ("<a>", SO, "<q><e><q>", ("And?", NEXT)), ("<q><e>", "", "", {"message": "<q><e>"})),
        # It is not shown, shows something else, or no control token follows it.
        (("<a><e>",), ("<a><e><q>", ("And?", NEXT)), None),
        (("<a>", SO, "<e>"), ("<a>", ("no", TURN), "<e>"), None),
        (("<a>", SO, ",", SO, "<e>"), ("<a>", SO, "<e>"), None),
        (("<a>", SO, "\n"), ("<a>", SO, "\nuser:", ("And?", NEXT)), None),
        (("<a>", SO, "<e>"), ("<a>", SO, "\nuser:", ("And?", NEXT)), None),
    ],
)
def test_how_answers_end(alone: Runs, followed: Runs, learned: Any) -> None:
    assert shown(learn_answers(sample(alone, followed), [])) == learned


@pytest.mark.parametrize(
    ("after", "inner", "closing"),
    [
        ("<e>\n<f>", "", "<f>"),
        ("<e>\n<f>", "<e>", "<f>"),
        ("<e>\n<f>", "<f>", "<e>"),
        ("<e><f>", "", "<e><f>"),
        ("<e><f>", "<e>", "<f>"),
        ("<e><f>", "<f>", "<e>"),
        ("<e>\n<f><g>", "", "<f><g>"),
        ("<e>\n<f>", "<e><f>", "<e>"),
        ("<e>\n<f>\n<g>", "<e><f>", "<g>"),
        ("<e>", "<e>", "<e>"),
    ],
)
def test_the_last_token_that_closes_no_part_ends_an_answer(after: str, inner: str, closing: str) -> None:
    turn = ("<a>", SO, f"{after}\n"), ("<a>", SO, f"{after}\n<q>", ("And?", NEXT))
    learned = learn_answers(sample(*turn), [], frozenset(ids(inner)))
    assert shown(learned) == (closing, "", "", {"message": after[: after.index(closing) + len(closing)]})


def test_control_tokens_within_turns_of_several_parts() -> None:
    parted = text("<q>", ("Why?", ASKED), "<a><t>", HM, "</t><e><a>", SO, "<e><f>")
    called = text("<q>", ("Why?", ASKED), "<a><t>", HM, "<g><c>", ("look", TURN), "</c>", ("door", TURN), "<f>")
    assert spelled(sorted(inner_controls(ENCODER, [(parted, TURN)]))) == "<a><e></t>"
    assert spelled(sorted(inner_controls(ENCODER, [(parted, TURN), (called, TURN)]))) == "<a><e><g></t><c></c>"
    assert inner_controls(ENCODER, [(text("<q>", ("Why?", ASKED), "<a>", SO, "<e>"), TURN)]) == frozenset()
    assert inner_controls(ENCODER, [(text("<q>", ("Why?", ASKED), "<e>"), TURN), (parted, NEXT)]) == frozenset()


@pytest.mark.parametrize(
    ("turn", "thoughts", "closed"),
    [
        (CHATML, [("<a><t>", HM, "</t><e>\n")], "</t><e>"),
        (CHATML, [("<a><t>", HM, "\n</t>\n<e>\n")], "\n</t>\n<e>"),
        # The token that closes a turn may close reasoning too.
        (CHATML, [("<a><t>", HM, "<e><a></t><e>\n")], "<e><a></t><e>"),
        # It does not show reasoning alone, or first; then reasoning before calls counts.
        (CHATML, [("<a><e>\n",), ("<a><t>", HM, "</t><c>", ("look", TURN), "</c><f>")], "</t><e>"),
        (
            CHATML,
            [("<a>", ("why", TURN), "<e>\n"), ("<a><t>", HM, "\n</t><f><c>", ("look", TURN), "</c>")],
            "\n</t><e>",
        ),
        (CHATML, [("<a><t>", HM, "</t><e>"), ("<a><t>", HM, "</t><f><c>", ("look", TURN))], "</t><e>"),
        (CHATML, [("<a>Thought: ", HM, " so ", ("look", TURN))], "<e>"),
        # Nowhere.
        (CHATML, [("<a><e>\n",)], None),
        (CHATML, [], None),
        # Nothing closes a turn: all that is written before the next message does.
        (NEXT_OPENS, [("<a><t>", HM, "</t>\n")], "</t>"),
        (NEXT_OPENS, [("<a><t>", HM, "</t><c>", ("look", TURN), "</c>")], "</t>"),
        # The closer of the last answer is replaced by the usual one.
        (LAST_DIFFERS, [("<a><t>", HM, "</t><g>")], "</t><e>"),
        (LAST_DIFFERS, [("<a><t>", HM, "<g></t>\n<g>")], "<g></t>\n<e>"),
    ],
)
def test_how_truncated_reasoning_is_closed(turn: Any, thoughts: list[Runs], closed: str | None) -> None:
    usual = shown(learn_answers(sample(*turn), []))
    learned = shown(learn_answers(sample(*turn), [text("<q>", ("Why?", ASKED), *thought) for thought in thoughts]))
    assert learned[:3] == usual[:3]
    assert learned[3] == usual[3] | ({} if closed is None else {"reasoning": closed})


LOOK = ("look", TURN)
CLOSED = Ending((*ids("<e>"),), frozenset(ids("<g>")), frozenset(), {Opened.MESSAGE: np.array(ids("<e>"), np.int32)})
TWICE = Ending((*ids("<e><f>"),), frozenset(), frozenset(), {Opened.MESSAGE: np.array(ids("<e><f>"), np.int32)})
OPEN = Ending((), frozenset(), frozenset(ids("<q>")), {Opened.MESSAGE: np.array([], np.int32)})


@pytest.mark.parametrize(
    ("answers", "alone", "followed", "next_", "learned"),
    [
        (CLOSED, '"}</c><e>\n', '"}</c><e>\n<q>', "", ("<e>", "<g>", "", {"message": "<e>", "call": "</c><e>"})),
        (
            CLOSED,
            '"}\n</c>\n<e>\n',
            '"}\n</c>\n<e>\n<q>',
            "",
            ("<e>", "<g>", "", {"message": "\n<e>", "call": "\n</c>\n<e>"}),
        ),
        (
            TWICE,
            "</c><e><f>\n",
            "</c><e><f>\n<q>",
            "<g>",
            ("<e><f>", "", "", {"message": "<e><f>", "call": "</c><e><f>"}),
        ),
        # Calls end with another token than answers, the last of those that are written either way.
        (CLOSED, "</c><f>\n", "</c><f>\n<o>", "<g>", ("<f>", "", "", {"message": "<f>", "call": "</c><f>"})),
        # The last call of all ends with another one still.
        (CLOSED, "}<c><f><g>", "}<f><o>", "<e>", ("<f>", "<g>", "", {"message": "<f>", "call": "<f>"})),
        (CLOSED, "", " <f><o>", "<e>", ("<f>", "", "", {"message": " <f>", "call": "<f>"})),
        # The opener of the results ends them, as that of a question ends answers.
        (OPEN, "}</c>", "}</c><o><t>", "<a>", ("", "", "<q><o>", {"message": "", "call": "</c>"})),
        (OPEN, "\n", "\n<q>", "<a>", ("", "", "<q>", {"message": "\n", "call": ""})),
        # Results follow within the turn: what closes the calls is all that ends it.
        (OPEN, "</c>", "</c>", "", ("</c>", "", "<q>", {"message": "</c>", "call": "</c>"})),
        (CLOSED, "</c><e>", "</c>[", "]<e>", ("</c>", "", "", {"message": "</c>", "call": "</c>"})),
        # The closer stands behind other blanks where results follow.
        (CLOSED, "</c><e>", "</c>\n<e><q>", "", ("<e>", "<g>", "", {"message": "\n<e>", "call": "</c>\n<e>"})),
        # Where the closer stands twice, an engine stops at the first.
        (CLOSED, "<e></c><e>", "<e></c><e><q>", "", ("<e>", "<g>", "", {"message": "<e>", "call": "<e>"})),
        # The opener of the next message is not a closer, even after a call that nothing follows.
        (CLOSED, "</c><q>", "</c><q>", "", ("</c>", "", "", {"message": "</c>", "call": "</c>"})),
        (CLOSED, "<q>", "<q>", "", ("", "", "<q>", {"message": "", "call": ""})),
        # No control token follows the calls.
        (CLOSED, "", "", "", None),
    ],
)
def test_how_calls_end(answers: Ending, alone: str, followed: str, next_: str, learned: Any) -> None:
    """What follows the call where nothing does, where its result does, and what follows the result."""
    call: Runs = ("<a><c>", LOOK)
    assert shown(learn_calls(sample((*call, alone), (*call, followed, ("seen", NEXT), next_)), answers)) == learned


def test_calls_that_are_not_shown_have_no_end() -> None:
    assert learn_calls(sample(("<a><e>",), ("<a><e><q>", ("seen", NEXT))), CLOSED) is None


def ending(closing: str, openers: str = "", **closers: str) -> Ending:
    given = {
        Opened(name): np.array([i for token in each.split() for i in ids(token)], np.int32)
        for name, each in closers.items()
    }
    return Ending(tuple(ids(closing)), frozenset(), frozenset(ids(openers)), given)


@pytest.mark.parametrize(
    ("answers", "calls", "shared", "closers", "call"),
    [
        # A call that was cut off is an answer to Strands: it is closed, and the turn ends as answers do.
        (
            ending("<e>", message="<e>", reasoning="</t> <e>"),
            ending("<e>", message="<e>", call="</c> <e>"),
            ("<e>", "<e>", ""),
            {"message": "<e>", "reasoning": "</t><e>", "call": "</c><e>"},
            {},
        ),
        (
            ending("<e>", message="<e>"),
            ending("<f>", message="<f>", call="</c> <f>"),
            ("<e>", "<f>", ""),
            {"message": "<e>", "call": "</c><e>"},
            {"message": "<f>", "call": "</c><f>"},
        ),
        (
            ending("<e><f>", message="<e> <f>"),
            ending("<g>", message="<g>", call="</c> <g>"),
            ("<e><f>", "<g>", ""),
            {"message": "<e><f>", "call": "</c><e><f>"},
            {"message": "<g>", "call": "</c><g>"},
        ),
        (
            ending("<e><f>", message="<e> <f>"),
            ending("<f>", message="<f>", call="</c> <f>"),
            ("<e><f>", "<f>", ""),
            {"message": "<e><f>", "call": "</c><f>"},
            {"message": "<f>"},
        ),
        # Openers end both.
        (
            ending("", "<q>", message=""),
            ending("", "<o>", message="", call="</c>"),
            ("", "", "<q><o>"),
            {"message": "", "call": "</c>"},
            {},
        ),
    ],
)
def test_closers_are_shared_between_answers_and_calls(
    answers: Ending, calls: Ending, shared: tuple[str, str, str], closers: Any, call: Any
) -> None:
    """The ends of both, and the closers of an answer; `call` are those of a call that differ."""
    one, other, openers = shared
    expected = [(one, "", openers, closers), (other, "", openers, {**closers, **call})]
    assert [shown(each) for each in share_closers(answers, calls)] == expected


def ints(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


TWO = Ending((7, 8), frozenset({9}), frozenset(), {Opened.MESSAGE: ints(1, 7, 8), Opened.REASONING: ints(2, 3, 7, 8)})
NONE = Ending((), frozenset(), frozenset({4, 5}), {Opened.MESSAGE: ints(), Opened.CALL: ints(6)})


@pytest.mark.parametrize(
    ("ending", "last", "opened", "missing"),
    [
        (TWO, None, Opened.MESSAGE, [1, 7, 8]),
        (TWO, 1, Opened.MESSAGE, [1, 7, 8]),
        (TWO, 7, Opened.MESSAGE, [8]),
        (TWO, 8, Opened.MESSAGE, []),
        (TWO, 9, Opened.MESSAGE, []),
        (TWO, None, Opened.REASONING, [2, 3, 7, 8]),
        (TWO, 7, Opened.REASONING, [8]),
        (TWO, 8, Opened.REASONING, []),
        (TWO, None, Opened.CALL, [1, 7, 8]),
        (NONE, None, Opened.MESSAGE, []),
        (NONE, 4, Opened.CALL, [6]),
        (NONE, None, Opened.CALL, [6]),
    ],
)
def test_missing_closers(ending: Ending, last: int | None, opened: Opened, missing: list[int]) -> None:
    assert ending.missing(last, opened).tolist() == missing


def test_stops() -> None:
    assert TWO.stops == {8, 9}
    assert NONE.stops == {4, 5}
    none: frozenset[int] = frozenset()
    assert stops_of([TWO, NONE], none) == (8, 4, 5, 9)
    assert stops_of([NONE], none) == (4, 5)


@pytest.mark.parametrize(
    ("inner", "stops"),
    [
        ({8}, (9, 4, 5)),  # the usual one closes parts too: the last answer's own end comes first
        ({8, 9}, (4, 5)),
        ({4}, (8, 5, 9)),
        ({7, 1}, (8, 4, 5, 9)),
        ({4, 5, 8, 9}, ()),
    ],
)
def test_a_token_that_closes_a_part_of_a_turn_is_not_a_stop(inner: set[int], stops: tuple[int, ...]) -> None:
    assert stops_of([TWO, NONE], frozenset(inner)) == stops
