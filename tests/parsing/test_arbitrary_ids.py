"""Any ids in any chunks give the same turn, valid spans and no exception.

TITO_CASES is the number of cases of each format, TITO_SEED their seed; `make prove` runs 20,000.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import get_args

import pytest

from parsing.families import CALL_FAMILIES, NAMES, Call, Family, ids_of, markup_of, schema_of
from parsing.test_decoding import BYTE_IDS
from parsing.test_formats import check_spans
from tito_core.parsing import CallStatus, ParsedTurn, ToolCalls, ToolParser, get_tool_parser

CASES, SEED = int(os.environ.get("TITO_CASES", "60")), int(os.environ.get("TITO_SEED", "0"))
TOOLS = {"look": schema_of({"at": "x", "far": 5, "all": [True]}), "count": schema_of({"of": "b"})}
CALLS: list[Call] = [("look", {"at": "x 🙂", "far": 5, "all": [True]}), ("count", {"of": "漢"})]
CHARACTERS = "é漢🙂￿".encode()


class Source:
    """Generates random ids for one format and vocabulary."""

    def __init__(self, family: Family, by_token: bool, rng: random.Random) -> None:
        self.family, self.by_token, self.rng = family, by_token, rng
        tokenizer = family.tokenizer(by_token)
        self.size = len(tokenizer)
        self.control = sorted(tokenizer.added_tokens_decoder)
        self.sound = ids_of(family, family.render(CALLS[: 1 if family.single_call else 2]), by_token)
        self.markup = [ids_of(family, tag, by_token) for tag in markup_of(family, by_token)]
        kinds: tuple[Callable[[], list[int]], ...] = (self.any_ids, self.bytes_cut, self.only_control, self.pieces)
        self.kinds = kinds

    def case(self, number: int) -> list[int]:
        return self.kinds[number % len(self.kinds)]()

    def any_ids(self) -> list[int]:
        return [self.rng.randrange(self.size + 50) for _ in range(self.rng.randrange(25))]

    def bytes_cut(self) -> list[int]:
        """Return bytes of characters, some missing, with whole tags between them."""
        ids: list[int] = []
        for byte in CHARACTERS * self.rng.randrange(1, 3):
            if self.rng.random() < 0.8:
                ids.append(BYTE_IDS[byte])
            if self.rng.random() < 0.15:
                ids += self.rng.choice(self.markup)
        return ids

    def only_control(self) -> list[int]:
        return [self.rng.choice(self.control) for _ in range(self.rng.randrange(20))]

    def pieces(self) -> list[int]:
        """Return parts of a valid turn and tags; often the turn's beginning first, which some formats need."""
        ids = self.sound[: self.rng.randrange(len(self.sound) + 1)] if self.rng.random() < 0.5 else []
        for _ in range(self.rng.randrange(1, 6)):
            start, stop = sorted(self.rng.randrange(len(self.sound) + 1) for _ in range(2))
            kind = self.rng.random()
            ids += self.sound[start:stop] if kind < 0.5 else self.sound if kind < 0.6 else self.rng.choice(self.markup)
        return ids


def parsed(parser: ToolParser, chunks: list[list[int]], tail: list[int], truncated: bool) -> ParsedTurn:
    session = parser.start(tail, TOOLS)
    for chunk in chunks:
        session.feed(chunk)
    return session.finish(truncated=truncated)


def split(ids: list[int], rng: random.Random) -> list[list[int]]:
    """Split ids at random places; some chunks are empty."""
    cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(6)))
    return [ids[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def check(turn: ParsedTurn, count: int, truncated: bool, lenient: bool) -> None:
    for call in turn.calls:
        assert (call.status == CallStatus.OK) == (not call.reason)
        assert call.status.runs == (call.arguments is not None)
        assert lenient or call.status != CallStatus.LENIENT
        assert not call.reason or call.reason.endswith(".")
        assert call.status != CallStatus.OK or call.name
        assert call.status != CallStatus.TRUNCATED or (truncated and call is turn.calls[-1])
    for suspect in turn.suspects:
        assert 0 <= suspect.start < suspect.stop <= count
        assert (suspect.status, suspect.arguments) == (CallStatus.SUSPECT, None)


@pytest.mark.parametrize("name", NAMES)
def test_any_ids_in_any_chunks_are_one_turn(name: str) -> None:
    family = CALL_FAMILIES[name]
    for by_token in (True, False):
        rng = random.Random(f"{name} {by_token} {SEED}")
        tokenizer = family.tokenizer(by_token)
        strict, lenient = (get_tool_parser(name, tokenizer, tool_calls=mode) for mode in get_args(ToolCalls))
        source = Source(family, by_token, rng)
        called = 0
        for number in range(CASES):
            ids, truncated = source.case(number), rng.random() < 0.5
            tail = rng.choice(source.markup) if rng.random() < 0.2 else []
            parser = lenient if number % 3 == 0 else strict
            turn = parsed(parser, [ids], tail, truncated)
            check_spans(tokenizer, ids, turn)
            check(turn, len(ids), truncated, parser is lenient)
            assert parsed(parser, split(ids, rng), tail, truncated) == turn, ids
            assert parsed(parser, [[token] for token in ids], tail, truncated) == turn, ids
            called += bool(turn.calls)
        assert called > CASES / 20, "too few cases contain a call"
    print(f"{CASES} cases")
