"""Every sentence that the ledger raises, word for word, and beside each the last value that is still right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.drafts import engine_record, make_draft
from tito_core.ledger import (
    Annotation,
    Branch,
    CallRecord,
    Column,
    Columns,
    Header,
    LawViolationError,
    Ledger,
    MediaSpan,
    Reason,
    ResponseSpan,
    Trajectory,
    Turn,
    VersionSpan,
    check_ledger,
)
from tito_core.ledger import forest_invariants as forest
from tito_core.ledger import invariants as laws

UUID = "00000000-0000-4000-8000-000000000000"
I32 = np.iinfo(np.int32)


def said(law: int | type[Exception], sentence: str, act: Callable[[], Any]) -> None:
    kind = LawViolationError if isinstance(law, int) else law
    with pytest.raises(kind) as caught:
        act()
    if isinstance(law, int):
        assert isinstance(caught.value, LawViolationError)
        assert caught.value.law == law
        sentence = f"Law {law}: {sentence}"
    assert str(caught.value) == (repr(sentence) if kind is KeyError else sentence)


def pack(**changes: Any) -> Columns:
    given = {"prompt_ids": [1, 2], "prompt_provenance": [0, 1], "output_ids": [3, 4, 5], "logprobs": [-1.0, -2.0, -3.0]}
    return Columns.pack(**{**given, **changes})


PACKED = [
    ({"logprobs": [[-1.0, -2.0, -3.0]]}, "logprobs must be floats of shape (n,), not float64 (1, 3)."),
    ({"logprobs": [-1, -2, -3]}, "logprobs must be floats of shape (n,), not int64 (3,)."),
    ({"prompt_provenance": [0]}, "2 delta ids but 1 provenances."),
    ({"logprobs": [-1.0]}, "3 output ids but 1 logprobs."),
    ({"prompt_ids": [[1, 2]]}, "delta ids must have shape (n,), not (1, 2)."),
    ({"output_ids": 3}, "output ids must have shape (n,), not ()."),
    ({"prompt_provenance": [[0, 1]]}, "provenance must have shape (n,), not (1, 2)."),
    ({"output_ids": [3.0, 4.0, 5.0]}, "output ids must be whole numbers, not float64."),
    ({"prompt_ids": [1, I32.max + 1]}, "delta ids hold 1 to 2147483648, outside -2147483648 to 2147483647."),
    ({"prompt_ids": [I32.min - 1, 1]}, "delta ids hold -2147483649 to 1, outside -2147483648 to 2147483647."),
    ({"prompt_provenance": [0, 256]}, "provenance hold 0 to 256, outside 0 to 255."),
    ({"prompt_provenance": [-1, 0]}, "provenance hold -1 to 0, outside 0 to 255."),
]


@pytest.mark.parametrize(("changes", "sentence"), PACKED)
def test_what_is_no_column(changes: dict[str, Any], sentence: str) -> None:
    said(2, sentence, lambda: pack(**changes))


def test_what_still_is_a_column() -> None:
    edges = np.array([I32.min, I32.max])
    packed = pack(prompt_ids=edges, prompt_provenance=[0, 255], output_ids=np.array([3, 4, 5], np.uint8))
    assert packed.prompt_ids.tolist() == edges.tolist()
    assert packed.prompt_provenance.tolist() == [0, 255]
    assert packed.ids.tolist() == [I32.min, I32.max, 3, 4, 5]
    assert (packed.ids.dtype, packed.logprobs.dtype) == (np.int32, np.float32)
    assert pack(output_ids=[], logprobs=[]).output == 0
    assert np.isinf(pack(logprobs=[-1e300, -1.0, -1.0]).logprobs[0])
    assert pack(logprobs=np.array([-1.5, -2, -3], np.float16)).logprobs.tolist() == [-1.5, -2.0, -3.0]


@pytest.mark.parametrize(("prompt", "output", "size"), [(1, 1, 12), (1, 1, 14), (-8, 5, 0)])
def test_columns_take_exactly_their_bytes(prompt: int, output: int, size: int) -> None:
    expected = 5 * prompt + 8 * output
    sentence = f"columns of {prompt} prompt and {output} output tokens take {expected} bytes, found {size}."
    said(2, sentence, lambda: Columns(prompt, output, bytes(size)))
    assert Columns(1, 1, bytes(13)).ids.tolist() == [0, 0]
    assert Columns(0, 0, b"").ids.tolist() == []


KINDS = "('|u1', '|i1', '<u2', '<i2', '<i4', '<f4')"
OPTIONAL = [
    (lambda: Column(0, "<i8", (1,), bytes(8)), f"an optional column has dtype '<i8', expected one of {KINDS}."),
    (
        lambda: Column(0, "<i2", (2, 3), bytes(11)),
        "an optional column of shape (2, 3) and dtype <i2 takes 12 bytes, found 11.",
    ),
    (lambda: Column(0, "|u1", (), bytes(1)), "an optional column of shape () and dtype |u1 takes 1 bytes, found 1."),
    (
        lambda: Column(0, "|u1", (-1, -1), bytes(1)),
        "an optional column of shape (-1, -1) and dtype |u1 takes 1 bytes, found 1.",
    ),
    (lambda: Column.of(0, 3), "an optional column must hold numbers row by row, not int64."),
    (lambda: Column.of(0, ["a"]), "an optional column must hold numbers row by row, not <U1."),
    (lambda: Column.of(0, [1e300]), "an optional column holds a number beyond float32."),
    (lambda: Column.of(0, [-1, I32.max + 1]), "an optional column holds -1 to 2147483648, more than int32 takes."),
]


@pytest.mark.parametrize(("act", "sentence"), OPTIONAL)
def test_what_is_no_optional_column(act: Callable[[], Any], sentence: str) -> None:
    said(2, sentence, act)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 255], "|u1"),
        ([-1, 127], "|i1"),
        ([-128, 0], "|i1"),
        ([0, 256], "<u2"),
        ([-1, 128], "<i2"),
        ([-129, 0], "<i2"),
        ([0, 65535], "<u2"),
        ([-1, 32768], "<i4"),
        ([0, 65536], "<i4"),
        ([I32.min, I32.max], "<i4"),
        ([True, False], "|u1"),
        ([0.5, np.inf], "<f4"),
        (np.zeros((0, 3), np.int64), "|u1"),
    ],
)
def test_an_optional_column_takes_the_smallest_dtype(values: Any, dtype: str) -> None:
    column = Column.of(4, values)
    assert (column.start, column.dtype, column.rows) == (4, dtype, len(values))
    assert column.values.tolist() == np.asarray(values).tolist()


def test_optional_columns_are_lined_up_and_fit_or_say_so() -> None:
    ledger = Ledger(UUID)
    extras = {"routed_experts": Column.of(0, [[7, 8]]), "top_ids": Column.of(1, [[255]]), "odd": Column.of(0, [[1]])}
    ledger.commit(make_draft(None, 0, [1], [2], extras=extras))
    more = {"routed_experts": Column.of(2, [[300, 9]]), "odd": Column.of(2, [[1, 2]]), "empty": Column.of(2, [])}
    ledger.commit(make_draft(0, 2, [3], [4], extras=more))
    (trajectory,) = ledger.trajectories()
    assert trajectory.column_names == ("routed_experts", "top_ids", "odd", "empty")
    assert trajectory.column("routed_experts", 1).tolist() == [[7, 8], [1, 1], [300, 9], [1, 1]]
    assert trajectory.column("routed_experts", 65535).dtype == np.uint16
    assert trajectory.column("top_ids", 0).tolist() == [[0], [255], [0], [0]]
    assert trajectory.column("top_ids", 255).tolist()[0] == [255]
    assert trajectory.column("empty", 3).tolist() == [3, 3, 3, 3]
    known = "routed_experts, top_ids, odd, empty"
    said(KeyError, f"No turn brought a column 'x'; there are {known}.", lambda: trajectory.column("x", 0))
    said(2, "optional column 'odd' has rows of shapes [(1,), (2,)].", lambda: trajectory.column("odd", 0))
    for fill in (256, -1, 0.5):
        sentence = f"{fill} does not fit optional column 'top_ids' of dtype uint8."
        said(2, sentence, lambda fill=fill: trajectory.column("top_ids", fill))
    hollow = Ledger(UUID)
    hollow.commit(make_draft(None, 0, [1], [2], extras={"empty": Column.of(0, np.zeros((0, 1)))}))
    hollow.commit(make_draft(0, 2, [1], [2], extras={"empty": Column.of(2, np.zeros((0, 2)))}))
    assert hollow.trajectories()[0].column("empty", 0).shape == (4, 1)
    bare = Ledger(UUID)
    bare.commit(make_draft(None, 0, [1], [2]))
    said(KeyError, "No turn brought a column 'x'; there are none.", lambda: bare.trajectories()[0].column("x", 0))


def test_a_sampling_mask_is_as_wide_as_its_longest_row() -> None:
    ledger = Ledger(UUID)
    ledger.commit(make_draft(None, 0, [1], [2], extras={"sampling_mask": Column.of(1, [[7, 255]])}))
    ledger.commit(make_draft(0, 2, [3], [4], extras={"sampling_mask": Column.of(3, [[8, 9, 254]])}))
    column = ledger.trajectories()[0].column("sampling_mask", -1)
    assert column.tolist() == [[-1, -1, -1], [7, 255, -1], [-1, -1, -1], [8, 9, 254]]
    assert column.dtype == np.int16


def spans(*ends: tuple[int, int]) -> Any:
    return replace(engine_record(3), versions=tuple(VersionSpan(start, stop, "v") for start, stop in ends))


FACTS = [
    ({"prompt_ids": [-5, 1]}, 2, "turn 0: delta id -5 at offset 0 is negative."),
    ({"output_ids": [1, 2, -1]}, 2, "turn 0: output id -1 at offset 2 is negative."),
    (
        {"prompt_provenance": [0, 3]},
        3,
        "turn 0: delta token 1 has provenance 3; only the engine's output may.",
    ),
    (
        {"prompt_length": 3},
        4,
        "turn 0: the engine reported a prompt of 3 tokens, the ledger holds 2 (0 of the path and 2 of the delta).",
    ),
    ({"logprobs": [-1.0, np.nan, -1.0]}, 4, "turn 0: logprob nan at output offset 1 is no log-probability."),
    ({"logprobs": [-np.inf, -1.0, -1.0]}, 4, "turn 0: logprob -inf at output offset 0 is no log-probability."),
    ({"logprobs": [-1.0, -1.0, -9999.0]}, 4, "turn 0: logprob -9999.0 at output offset 2 is no log-probability."),
    ({"logprobs": [-1.0, 0.25, -1.0]}, 4, "turn 0: logprob 0.25 at output offset 1 is no log-probability."),
    ({"calls": (CallRecord("look", "ok", 1, 4),)}, 9, "turn 0: a call spans output tokens 1:4, of 3."),
    ({"calls": (CallRecord("look", "ok", -1, 2),)}, 9, "turn 0: a call spans output tokens -1:2, of 3."),
    ({"calls": (CallRecord("look", "ok", 2, 1),)}, 9, "turn 0: a call spans output tokens 2:1, of 3."),
    ({"engine": spans((0, 2), (1, 3))}, 10, "turn 0: weight-version span 1:3 should start at output offset 2."),
    ({"engine": spans((0, 3), (3, 2))}, 10, "turn 0: weight-version span 3:2 should start at output offset 3."),
    ({"engine": spans((0, 2))}, 10, "turn 0: weight-version spans end at 2, the output has 3 tokens."),
    ({"engine": spans((0, 4))}, 10, "turn 0: weight-version spans end at 4, the output has 3 tokens."),
    ({"engine": spans()}, 10, "turn 0: weight-version spans end at 0, the output has 3 tokens."),
    (
        {"extras": {"top_ids": Column.of(1, [[1], [2], [3]])}},
        2,
        "turn 0: column 'top_ids' has rows 1:4, expected those of the output, 2:5.",
    ),
    (
        {"extras": {"sampling_mask": Column.of(2, [[1], [2]])}},
        2,
        "turn 0: column 'sampling_mask' has rows 2:4, expected those of the output, 2:5.",
    ),
    (
        {"extras": {"top_logprobs": Column.of(2, [[-1.0], [-1.0]])}},
        2,
        "turn 0: column 'top_logprobs' has rows 2:4, expected those of the output, 2:5.",
    ),
    (
        {"extras": {"top_logprobs": Column.of(2, [[-1.0, -2.0], [-1.0, 0.5], [-1.0, -2.0]])}},
        4,
        "turn 0: logprob 0.5 at output offset 3 is no log-probability.",
    ),
    (
        {"extras": {"top_logprobs": Column.of(2, [[-1.0, np.nan], [-1.0, -np.inf], [-1.0, -2.0]])}},
        4,
        "turn 0: logprob -inf at output offset 3 is no log-probability.",
    ),
    (
        {"extras": {"top_ids": Column.of(2, [[1, 2]] * 3), "top_logprobs": Column.of(2, [[-1.0]] * 3)}},
        2,
        "turn 0: top_ids of shape (3, 2) and top_logprobs of shape (3, 1) do not match.",
    ),
    (
        {"extras": {"top_ids": Column.of(2, [[1]] * 3), "top_logprobs": Column.of(2, [[-1.0], [np.nan], [-1.0]])}},
        2,
        "turn 0: top_ids of shape (3, 1) and top_logprobs of shape (3, 1) do not match.",
    ),
    (
        {"extras": {"top_ids": Column.of(2, [[1], [-1], [1]]), "top_logprobs": Column.of(2, [[-1.0]] * 3)}},
        2,
        "turn 0: top_ids of shape (3, 1) and top_logprobs of shape (3, 1) do not match.",
    ),
    (
        {"extras": {"routed_experts": Column.of(3, [[1], [2], [3]])}},
        2,
        "turn 0: column 'routed_experts' has rows 3:6, outside the 5 tokens of its path.",
    ),
    (
        {"extras": {"routed_experts": Column.of(-1, [[1]])}},
        2,
        "turn 0: column 'routed_experts' has rows -1:0, outside the 5 tokens of its path.",
    ),
    (
        {"media": (MediaSpan(1, 1, bytes(32)), MediaSpan(1, 1, bytes(32)))},
        2,
        "turn 0: media span 1:2 should lie within 2:2.",
    ),
    ({"media": (MediaSpan(0, 0, bytes(32)),)}, 2, "turn 0: media span 0:0 should lie within 0:2."),
    ({"media": (MediaSpan(1, 2, bytes(32)),)}, 2, "turn 0: media span 1:3 should lie within 0:2."),
    ({"media": (MediaSpan(0, 1, bytes(31)),)}, 2, "turn 0: a media digest has 31 bytes, SHA-256 has 32."),
    (
        {"branch": Branch(Reason.EDIT, 0)},
        8,
        "turn 0: it is the first root, and yet a branch (edit, from turn 0).",
    ),
]


@pytest.mark.parametrize(("changes", "law", "sentence"), FACTS)
def test_what_is_no_turn(changes: dict[str, Any], law: int, sentence: str) -> None:
    ledger = Ledger(UUID)
    said(law, sentence, lambda: ledger.commit(make_draft(None, 0, [1, 2], [3, 4, 5], **changes)))
    assert len(ledger) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": [0, 0], "output_ids": [0, 0, 0]},
        {"prompt_provenance": [2, 2]},
        {"logprobs": [0.0, 0.00009, -9998.0]},
        {"calls": (CallRecord("look", "ok", 0, 3), CallRecord("look", "ok", 3, 3))},
        {"engine": spans((0, 0), (0, 1), (1, 3), (3, 3))},
        {"extras": {"routed_experts": Column.of(0, [[1]] * 5), "prompt_logprobs": Column.of(1, [np.nan])}},
        {"extras": {"top_ids": Column.of(2, [[1]] * 3), "top_logprobs": Column.of(2, [[-1.0]] * 3)}},
        {"extras": {"top_ids": Column.of(2, [[1, -1]] * 3), "top_logprobs": Column.of(2, [[-1.0, np.nan]] * 3)}},
        {"media": (MediaSpan(0, 1, bytes(32)), MediaSpan(1, 1, bytes(32)))},
    ],
)
def test_what_still_is_a_turn(changes: dict[str, Any]) -> None:
    ledger = Ledger(UUID)
    ledger.commit(make_draft(None, 0, [1, 2], [3, 4, 5], **changes))
    check_ledger(ledger)


def test_a_delta_without_tokens_and_an_answer_without_are_turns() -> None:
    ledger = Ledger(UUID)
    ledger.commit(make_draft(None, 0, [1], []))
    ledger.commit(make_draft(0, 1, [], [2]))
    check_ledger(ledger)
    assert ledger.trajectories()[0].token_ids.tolist() == [1, 2]


def test_the_answer_is_named_where_no_turn_is_known() -> None:
    sentence = "the answer: logprob 1.0 at output offset 0 is no log-probability."
    said(4, sentence, lambda: laws.check_logprobs([1.0]))
    sentence = "the answer: weight-version spans end at 1, the output has 2 tokens."
    said(10, sentence, lambda: laws.check_versions([VersionSpan(0, 1, None)], 2))
    laws.check_logprobs([])
    laws.check_versions([], 0)


def two_turns() -> Ledger:
    ledger = Ledger(UUID)
    ledger.commit(make_draft(None, 0, [1], [2]))
    ledger.commit(make_draft(0, 2, [3], [4]))
    return ledger


def test_a_turns_path_is_its_parents_and_its_own() -> None:
    ledger = two_turns()
    wrong = replace(ledger[1], path_length=5)
    sentence = "turn 1: its path has 5 tokens, expected 2 of its parent and 2 of its own."
    said(1, sentence, lambda: laws.check_prefix(ledger, wrong))
    ledger._turns[1] = wrong
    said(1, sentence, lambda: check_ledger(ledger))


def linked(index: int, parent: int | None, branch: Branch | None) -> Turn:
    return Turn(index, make_draft(parent, 0, [1], [2], branch=branch), 2)


BRANCHES = [
    (2, 1, Branch(Reason.EDIT, 0), True, "it is the first turn after turn 1, and yet a branch (edit, from turn 0)."),
    (2, 1, None, False, "it is not the first turn after turn 1, and no reason says why it branches."),
    (2, None, None, False, "it is not the first root, and no reason says why it branches."),
    (2, None, Branch(Reason.EDIT, 2), False, "it left turn 2, which is not before it."),
    (2, None, Branch(Reason.EDIT, -1), False, "it left turn -1, which is not before it."),
]


@pytest.mark.parametrize(("index", "parent", "branch", "first", "sentence"), BRANCHES)
def test_what_is_no_branch(index: int, parent: int | None, branch: Branch | None, first: bool, sentence: str) -> None:
    said(8, f"turn {index}: {sentence}", lambda: laws.check_branch(linked(index, parent, branch), first=first))
    laws.check_branch(linked(2, None, Branch(Reason.EDIT, 1)), first=False)
    laws.check_branch(linked(2, None, Branch(Reason.EDIT, 0)), first=False)
    laws.check_branch(linked(2, 1, None), first=True)


def test_columns_of_a_trajectory_are_held_to_one_another() -> None:
    (good,) = two_turns().trajectories()
    for name in ("loss_mask", "logprobs", "provenance"):
        short = replace(good, **{name: getattr(good, name)[:3]})
        said(
            2,
            f"column {name} has 3 entries for 4 token ids.",
            lambda short=short: forest.check_alignment(short),
        )
    shifted = replace(good, logprobs=np.roll(good.logprobs, -1))
    said(2, "token 0 has provenance 0 and logprob -1.0.", lambda: forest.check_alignment(shifted))
    doubled = replace(good, path=good.path * 2)
    said(2, "the turns of the path hold 8 tokens, the columns 4.", lambda: forest.check_alignment(doubled))
    masked = replace(good, loss_mask=np.ones(4, np.uint8))
    sentence = "a token that the engine did not report as output has loss mask 1."
    said(3, sentence, lambda: forest.count_trained(masked, Counter()))


def test_each_token_is_trained_once() -> None:
    ledger = two_turns()
    said(
        3,
        "turn 0: 0 of its tokens are trained, expected 1.",
        lambda: forest.check_trained_once(ledger, Counter()),
    )
    trained = Counter({0: 1, 1: 2})
    said(
        3,
        "turn 1: 2 of its tokens are trained, expected 1.",
        lambda: forest.check_trained_once(ledger, trained),
    )
    forest.check_trained_once(ledger, Counter({0: 1, 1: 1}))


def test_what_can_be_neither_annotated_nor_followed() -> None:
    ledger = two_turns()
    for turn in (2, -1):
        said(
            IndexError,
            f"There is no turn {turn} to annotate; the ledger holds 2.",
            lambda turn=turn: ledger.annotate("reward", 1, turn=turn),
        )
        said(
            IndexError,
            f"Turn 2 cannot follow turn {turn}: the ledger holds 2 turns.",
            lambda turn=turn: ledger.commit(make_draft(turn, 4, [1], [2])),
        )
    ledger.annotate("reward", 1, turn=1)
    ledger.annotate("reward", 2, turn=0)
    assert (ledger.annotation("reward", turn=1), ledger.annotation("reward", turn=0)) == (1, 2)
    assert (ledger.annotation("reward"), ledger.annotation("reward", default=7)) == (None, 7)
    ledger._annotations.append(Annotation("late", 1, 2))
    said(8, "annotation 'late' is about turn 2; there are 2.", lambda: check_ledger(ledger))


NOT_JSON: list[tuple[Any, type[Exception], str]] = [
    ({1: 2}, TypeError, "user has the keys [1]; in JSON a key is a string."),
    ({"a": {1}}, TypeError, "user['a'] is {1}, which is not JSON."),
    ({"a": [0, b"x"]}, TypeError, "user['a'][1] is b'x', which is not JSON."),
    ({"a": 2**64}, ValueError, "user['a'] is 18446744073709551616, which needs more than 64 bits."),
    ({"a": -(2**63) - 1}, ValueError, "user['a'] is -9223372036854775809, which needs more than 64 bits."),
]


@pytest.mark.parametrize(("user", "kind", "sentence"), NOT_JSON)
def test_what_is_no_json(user: Any, kind: type[Exception], sentence: str) -> None:
    said(kind, sentence, lambda: Header(UUID, user=user))


def test_what_still_is_json() -> None:
    user = {"a": [2**64 - 1, -(2**63), True, None, 0.5, (1, 2)], "b": np.float32(0.5), "c": {"d": "é"}}
    expected = {"a": [2**64 - 1, -(2**63), True, None, 0.5, [1, 2]], "b": 0.5, "c": {"d": "é"}}
    assert Header(UUID, user=user).user == expected
    assert type(Header(UUID, user=user).user["b"]) is float
    assert Annotation("x", user).value == expected


@pytest.mark.parametrize("name", ["group_id", "task_id", "tokenizer"])
def test_names_are_strings(name: str) -> None:
    said(TypeError, f"{name} is 42; it must be a string, such as '42', or None.", lambda: Header(UUID, **{name: 42}))
    assert getattr(Header(UUID, **{name: "é"}), name) == "é"
    with pytest.raises(UnicodeEncodeError):
        Header(UUID, **{name: "\ud800"})


def test_identities_and_annotations_are_named() -> None:
    for wrong in ("x", UUID.upper().replace("0", "A"), 7, None):
        with pytest.raises(ValueError, match=r"is not a canonical UUID, such as [0-9a-f-]{36}\.$") as caught:
            Header(wrong)  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{wrong!r} is not a canonical UUID")
    said(TypeError, "An annotation's name is 1; it must be a string.", lambda: Annotation(1, 2))  # type: ignore[arg-type]
    with pytest.raises(UnicodeEncodeError):
        Annotation("\ud800", 1)
    said(TypeError, "reward is {1}, which is not JSON.", lambda: Annotation("reward", {1}))


SPANS = [
    ([(0, 3)], None),
    ([(0, 1), (1, 3)], None),
    ([], "response spans end at 0, the output has 3 tokens."),
    ([(0, 2)], "response spans end at 2, the output has 3 tokens."),
    ([(0, 4)], "response spans end at 4, the output has 3 tokens."),
    ([(1, 3)], "response span 1:3 should start at output offset 0."),
    ([(0, 1), (2, 3)], "response span 2:3 should start at output offset 1."),
    ([(0, 2), (1, 3)], "response span 1:3 should start at output offset 2."),
    ([(0, 0), (0, 3)], "response span 0:0 should start at output offset 0."),
    ([(0, 3), (3, 2)], "response span 3:2 should start at output offset 3."),
]


@pytest.mark.parametrize(("spans", "sentence"), SPANS)
def test_the_responses_of_a_resumed_turn_tile_it(spans: list[tuple[int, int]], sentence: str | None) -> None:
    responses = [ResponseSpan(start, stop, "r") for start, stop in spans]
    if sentence is None:
        laws.check_responses(responses, 3, turn=7)
    else:
        said(4, f"turn 7: {sentence}", lambda: laws.check_responses(responses, 3, turn=7))
    draft = make_draft(None, 0, [1, 2], [3, 4, 5])
    resumed = replace(draft, engine=replace(draft.engine, responses=tuple(responses)))
    if sentence is None or not responses:  # none: one response is all
        Ledger().commit(resumed)
    else:
        said(4, f"turn 0: {sentence}", lambda: Ledger().commit(resumed))


def three_turns() -> Ledger:
    ledger = Ledger()
    for _ in range(3):
        parent = len(ledger) - 1 if len(ledger) else None
        ledger.commit(make_draft(parent, ledger.path_length(parent), [0, 2], [3, 0, 5]))
    return ledger


WRONG: dict[str, Callable[[Trajectory], dict[str, Any]]] = {
    "a mask too short": lambda t: {"loss_mask": t.loss_mask[1:]},
    "a logprob too few": lambda t: {"logprobs": t.logprobs[:-1]},
    "a token too few": lambda t: {
        "token_ids": t.token_ids[:-1],
        "loss_mask": t.loss_mask[:-1],
        "logprobs": t.logprobs[:-1],
        "provenance": t.provenance[:-1],
    },
    "a turn too few": lambda t: {"path": t.path[:-1]},
    "a logprob on a prompt": lambda t: {"logprobs": np.where(np.arange(len(t.logprobs)) == 5, -1.0, t.logprobs)},
    "no logprob on an output": lambda t: {"logprobs": np.where(np.arange(len(t.logprobs)) == 3, np.nan, t.logprobs)},
    "an id below 0": lambda t: {"token_ids": np.where(np.arange(len(t.token_ids)) == 7, -1, t.token_ids)},
    "a sentinel": lambda t: {"logprobs": np.where(np.arange(len(t.logprobs)) == 3, -9999.0, t.logprobs)},
    "a logprob above 0": lambda t: {"logprobs": np.where(np.arange(len(t.logprobs)) == 3, 2e-4, t.logprobs)},
}


def test_what_is_sound_is_told_at_once_from_what_is_not() -> None:
    [whole] = three_turns().trajectories()
    assert forest._is_sound(whole)
    at_the_bound = np.where(np.isfinite(whole.logprobs), np.float64(laws.ROUNDING), whole.logprobs)
    assert forest._is_sound(replace(whole, logprobs=at_the_bound))
    for name, change in WRONG.items():
        assert not forest._is_sound(replace(whole, **change(whole))), name


def test_the_first_wrong_place_is_named_after_values_at_the_bound() -> None:
    ids = lambda *values: replace(make_draft(None, 0, [1], [2]), columns=pack(output_ids=values))  # noqa: E731
    for place in range(3):
        values = [0, 0, 0]
        values[place] = -7
        sentence = f"turn 4: output id -7 at offset {place} is negative."
        said(2, sentence, lambda values=values: laws.check_values(ids(*values), turn=4))
    laws.check_values(ids(0, 0, 0), turn=4)
    mixed = replace(make_draft(None, 0, [1], [2]), columns=pack(prompt_provenance=[2, 3]))
    said(
        3,
        "turn 4: delta token 1 has provenance 3; only the engine's output may.",
        lambda: laws.check_values(mixed, turn=4),
    )


def test_a_ledger_names_the_turn_whose_facts_are_wrong() -> None:
    ledger = three_turns()
    wrong = replace(ledger[1].draft, prompt_length=99)
    loaded = Ledger.load(ledger.header, [ledger[0].draft, wrong, ledger[2].draft], [])
    sentence = (
        "turn 1: the engine reported a prompt of 99 tokens, the ledger holds 7 (5 of the path and 2 of the delta)."
    )
    said(4, sentence, lambda: check_ledger(loaded))


def test_a_resumed_turn_keeps_its_responses() -> None:
    spans = (ResponseSpan(0, 1, "a"), ResponseSpan(1, 3, "b"))
    draft = make_draft(None, 0, [1, 2], [3, 4, 5])
    turn = Ledger().commit(replace(draft, engine=replace(draft.engine, responses=spans)))
    assert turn.draft.engine.responses == spans
