"""A preview is a prefix of the parser's final result, however the ids are split."""

from __future__ import annotations

import random

import pytest

from parsing.families import CALL_FAMILIES, NAMES, ids_of
from parsing.test_arbitrary_ids import CASES, SEED, TOOLS, Source, parsed, split
from tito_core.ledger.turn import Finish
from tito_core.parsing import CallStatus, ParsedTurn, get_tool_parser
from tito_core.parsing.formats.gpt_oss import HarmonyParser
from tito_core.parsing.turn import Piece, TurnParser
from tito_core.turn.answer import _check_preview, assistant_message

PREVIEWED = [name for name in NAMES if name != "gpt_oss"]
FRAGMENTS = (
    "Hm.",
    "\n",
    " ",
    "\n\n",
    "é漢🙂",
    "<",
    "<to",
    "a <b> c",
    "{",
    "[x",
    "f",
    "function",
    "thought\n",
    "th",
    "</",
)


def shown(parser: TurnParser, chunks: list[list[int]], tail: list[int]) -> list[Piece]:
    preview = parser.preview(tail)
    return [piece for chunk in chunks for piece in preview.feed(chunk)]


def texts(pieces: list[Piece]) -> tuple[str, str]:
    by_kind = {kind: "".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "text")}
    return by_kind["reasoning"], by_kind["text"]


def expect_beginning(pieces: list[Piece], turn: ParsedTurn) -> tuple[str, str]:
    """Check that reasoning comes first, and that both kinds are prefixes of the parsed message."""
    kinds = [piece.kind for piece in pieces]
    assert kinds == sorted(kinds)
    assert all(piece.text for piece in pieces)
    thought, text = texts(pieces)
    early = turn.reasoning.removesuffix(turn.late_reasoning) if turn.late_reasoning else turn.reasoning
    assert early.startswith(thought)
    assert turn.text.startswith(text)
    assert not thought or thought.strip()
    assert not text or text.strip()
    if text and early.strip():
        assert thought == early.removesuffix("\n"), "text is shown only once the reasoning before it is all there"
    return thought, text


def random_message(source: Source, rng: random.Random) -> list[int]:
    """Return ids of random text, reasoning and calls, some of them cut."""
    ids: list[int] = []
    for _ in range(rng.randrange(1, 9)):
        kind = rng.random()
        if kind < 0.6:
            ids += ids_of(source.family, rng.choice(FRAGMENTS), source.by_token)
        elif kind < 0.85:
            ids += rng.choice(source.markup)
        else:
            ids += source.sound[: rng.randrange(len(source.sound) + 1)]
    return ids


@pytest.mark.parametrize("name", PREVIEWED)
def test_a_preview_is_a_prefix_of_the_result(name: str) -> None:
    family = CALL_FAMILIES[name]
    for by_token in (True, False):
        rng = random.Random(f"preview {name} {by_token} {SEED}")
        parser = get_tool_parser(name, family.tokenizer(by_token))
        assert isinstance(parser, TurnParser)
        source = Source(family, by_token, rng)
        shown_turns = 0
        for number in range(CASES):
            ids = source.case(number) if number % 3 == 0 else random_message(source, rng)
            tail = rng.choice(source.markup) if rng.random() < 0.3 else []
            turn = parsed(parser, [ids], tail, rng.random() < 0.5)
            each = shown(parser, [[token] for token in ids], tail)
            shown_turns += any(expect_beginning(each, turn))
            assert texts(shown(parser, split(ids, rng), tail)) == texts(each)
    assert shown_turns > CASES / 6, "too little was shown to show anything"


def harmony(by_token: bool = True) -> HarmonyParser:
    parser = get_tool_parser("gpt_oss", CALL_FAMILIES["gpt_oss"].tokenizer(by_token))
    assert isinstance(parser, HarmonyParser)
    return parser


@pytest.mark.parametrize("by_token", [True, False])
def test_a_preview_of_harmony_is_a_prefix_of_its_reasoning(by_token: bool) -> None:
    family, parser = CALL_FAMILIES["gpt_oss"], harmony(by_token)
    rng = random.Random(f"preview gpt_oss {by_token} {SEED}")
    source = Source(family, by_token, rng)
    shown_turns = 0
    for number in range(CASES):
        ids = source.case(number) if number % 3 == 0 else random_message(source, rng)
        if number % 2:  # insert complete messages
            for word in rng.choices(("Hm.", "\n", "é🙂"), k=3):
                whole = f"<|channel|>analysis<|message|>{word}<|end|><|start|>assistant"
                at = 0 if rng.random() < 0.7 else rng.randrange(len(ids) + 1)
                ids[at:at] = ids_of(family, whole, by_token)
        tail = ids_of(family, "<|start|>assistant", by_token) if rng.random() < 0.8 else rng.choice(source.markup)
        turn = parsed(parser, [ids], tail, rng.random() < 0.5)
        for chunks in ([[token] for token in ids], split(ids, rng), [ids]):
            preview = parser.preview(tail)
            pieces = [piece for chunk in chunks for piece in preview.feed(chunk)]
            thought, text = texts(pieces)
            assert turn.reasoning.startswith(thought)
            assert not text
            assert not thought or thought.strip()
            assert all(piece.text for piece in pieces)
            shown_turns += bool(thought)
            message = assistant_message(turn, Finish.STOP, lambda: "call_1", "feedback", True)
            _check_preview(message["content"], [Piece("reasoning", thought)] if thought else [])  # else it raises
    assert shown_turns > CASES / 2 if by_token else shown_turns == 0, "text that spells a tag may yet be none"


def test_harmony_shows_reasoning_as_soon_as_its_message_is_closed() -> None:
    family, parser = CALL_FAMILIES["gpt_oss"], harmony()
    preview = parser.preview(ids_of(family, "<|start|>assistant"))
    feed = lambda completion: [piece for token in ids_of(family, completion) for piece in preview.feed([token])]  # noqa: E731
    assert feed("<|channel|>analysis<|message|>Hm.") == []
    assert feed("<|end|>") == [("reasoning", "Hm.")]
    assert feed("<|start|>assistant<|channel|>commentary<|message|>So.<|end|>") == []
    assert feed("<|start|>assistant<|channel|>analysis<|message|>\nAh.\n<|end|>") == [("reasoning", "\nAh.")]
    assert feed("<|start|>assistant<|channel|>final<|message|>Yes.<|return|>") == []


def test_a_blank_thought_and_a_call_are_not_shown() -> None:
    family, parser = CALL_FAMILIES["gpt_oss"], harmony()
    preview = parser.preview(ids_of(family, "<|start|>assistant"))
    completion = "<|channel|>analysis<|message|> <|end|><|start|>assistant<|channel|>analysis<|message|>{}<|call|>"
    assert preview.feed(ids_of(family, completion)) == []


@pytest.mark.parametrize("name", PREVIEWED)
def test_an_answer_without_calls_is_shown_completely(name: str) -> None:
    family = CALL_FAMILIES[name]
    parser = get_tool_parser(name, family.tokenizer(True))
    assert isinstance(parser, TurnParser)
    opened, closed = family.think or ("", "")
    for completion, thought, text in [
        ("Well, é🙂 yes.", "", "Well, é🙂 yes."),
        *([(f"{opened}\nHm. So.\n{closed}\n\nYes. ", "Hm. So.", "Yes.")] if family.think else []),
    ]:
        ids = [*ids_of(family, completion), *ids_of(family, "<|im_end|>")]
        pieces = shown(parser, [[token] for token in ids], [])
        assert texts(pieces) == (thought, text)
        assert len(pieces) > 3
        turn = parsed(parser, [ids], [], False)
        assert (turn.reasoning, turn.text) == (thought, text)


def test_nothing_of_a_call_or_after_it_is_shown() -> None:
    family = CALL_FAMILIES["hermes"]
    parser = get_tool_parser("hermes", family.tokenizer(False))
    assert isinstance(parser, TurnParser)
    completion = "So. " + family.render([("look", {"at": "x"})]) + "After."
    ids = ids_of(family, completion, False)
    assert texts(shown(parser, [[token] for token in ids], [])) == ("", "So.")
    turn = parser.start([], TOOLS)
    turn.feed(ids)
    whole = turn.finish(truncated=False)
    assert [call.status for call in whole.calls] == [CallStatus.OK]
    assert whole.text == "So. After."


def test_reasoning_after_text_keeps_its_place() -> None:
    family = CALL_FAMILIES["hermes"]
    parser = get_tool_parser("hermes", family.tokenizer(True))
    assert isinstance(parser, TurnParser)
    ids = ids_of(family, "<think>A</think>\n<think>B</think>x<think>C</think>y")
    turn = parsed(parser, [ids], [], False)
    assert (turn.reasoning, turn.late_reasoning, turn.text) == ("A\nB\nC", "C", "xy")
    assert texts(shown(parser, [[token] for token in ids], [])) == ("A\nB", "xy")


def test_a_long_answer_is_decoded_once() -> None:
    """The cost of a token does not grow with the text before it: ids that were read are dropped."""
    family = CALL_FAMILIES["hermes"]
    parser = get_tool_parser("hermes", family.tokenizer(True))
    assert isinstance(parser, TurnParser)
    preview = parser.preview([])
    for token in ids_of(family, "Well, é🙂 yes. " * 500):
        preview.feed([token])
        assert len(preview._ids) < 12


def test_held_drafts_are_searched_for_tags_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 14: text that was held until the reasoning closed is read only once more."""
    family = CALL_FAMILIES["hermes"]
    parser = get_tool_parser("hermes", family.tokenizer(True))
    assert isinstance(parser, TurnParser)
    draft = family.render([("look", {"at": "x"})])
    preview = parser.preview(ids_of(family, "<think>"))
    searched: list[int] = []
    marks = parser.markup.marks
    monkeypatch.setattr(parser.markup, "marks", lambda decoded: searched.append(len(decoded.text)) or marks(decoded))
    assert preview.feed(ids_of(family, draft * 20)) == []
    assert len(searched) == 1
    assert texts(preview.feed(ids_of(family, "</think>"))) == ((draft * 20).strip(), "")
    assert len(searched) == 2
