"""Columns of a turn: what they hold exactly, what they refuse, and how optional columns line up in a trajectory."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from support.drafts import make_draft
from support.refusals import breaks_law
from tito_core.ledger import Column, Columns, Ledger

I32 = np.iinfo(np.int32)
DIMENSIONS = 32
"""As many dimensions as every NumPy allows."""
LARGEST = sys.maxsize // 4
"""Most float32 values that NumPy can address, also where another dimension is 0."""


def pack(**changes: Any) -> Columns:
    given = {"prompt_ids": [1, 2], "prompt_provenance": [0, 1], "output_ids": [3, 4, 5], "logprobs": [-1.0, -2.0, -3.0]}
    return Columns.pack(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"logprobs": [[-1.0, -2.0, -3.0]]}, ["logprobs", "float64", "(1, 3)"]),
        ({"logprobs": [-1, -2, -3]}, ["logprobs", "int64"]),
        ({"logprobs": [None, None, None]}, ["logprobs", "object"]),
        ({"logprobs": ["-1.0", "-2.0", "-3.0"]}, ["logprobs", "<U4"]),
        ({"prompt_provenance": [0]}, ["2 delta ids", "1 provenance"]),
        ({"logprobs": [-1.0]}, ["3 output ids", "1 logprobs"]),
        ({"prompt_ids": [[1, 2]]}, ["delta ids", "(1, 2)"]),
        ({"output_ids": 3}, ["output ids", "()"]),
        ({"prompt_provenance": [[0, 1]]}, ["provenance", "(1, 2)"]),
        ({"output_ids": [3.0, 4.0, 5.0]}, ["output ids", "float64"]),
        ({"prompt_ids": [True, False]}, ["delta ids", "bool"]),
        ({"output_ids": [2**70, 4, 5]}, ["output ids", "object"]),
        ({"output_ids": np.array([2**64 - 1, 4, 5], np.uint64)}, ["output ids", 2**64 - 1]),
        ({"prompt_ids": [1, I32.max + 1]}, ["delta ids", 2147483648]),
        ({"prompt_ids": [I32.min - 1, 1]}, ["delta ids", -2147483649]),
        ({"prompt_provenance": [0, 256]}, ["provenance", 256]),
        ({"prompt_provenance": [-1, 0]}, ["provenance", -1]),
    ],
)
def test_pack_refuses_wrong_shapes_types_and_ranges(changes: dict[str, Any], values: list[object]) -> None:
    with breaks_law(2, *values):
        pack(**changes)


def test_pack_keeps_values_at_the_bounds() -> None:
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
    with breaks_law(2, f"{5 * prompt + 8 * output} bytes", f"found {size}"):
        Columns(prompt, output, bytes(size))
    assert Columns(1, 1, bytes(13)).ids.tolist() == [0, 0]
    assert Columns(0, 0, b"").ids.tolist() == []


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "values"),
    [
        ("<i8", (1,), 8, ["<i8", "<f4"]),
        ("<i2", (2, 3), 11, ["(2, 3)", "<i2", "12 bytes", "found 11"]),
        ("|u1", (), 1, ["()"]),
        ("|u1", (-1, -1), 1, ["(-1, -1)"]),
        ("|u1", (1,) * (DIMENSIONS + 1), 1, [DIMENSIONS + 1, DIMENSIONS]),
        ("<f4", (0, LARGEST + 1), 0, [LARGEST + 1]),
    ],
)
def test_an_optional_column_takes_exactly_its_bytes(
    dtype: str, shape: tuple[int, ...], size: int, values: list[object]
) -> None:
    with breaks_law(2, *values):
        Column(0, dtype, shape, bytes(size))
    assert Column(0, "|u1", (1,) * DIMENSIONS, b"x").values.ndim == DIMENSIONS
    assert Column(0, "<f4", (0, LARGEST), b"").values.shape == (0, LARGEST)


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        (3, ["int64", "()"]),
        (["a"], ["<U1"]),
        ([1j], ["complex128"]),
        ([1e300], ["float32"]),
        ([-1, I32.max + 1], ["-1 to 2147483648", "int32"]),
        ([I32.min - 1], ["-2147483649", "int32"]),
    ],
)
def test_an_optional_column_refuses_other_values(rows: Any, values: list[object]) -> None:
    with breaks_law(2, *values):
        Column.of(0, rows)


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
        ([0.5, np.inf, -np.inf, np.nan], "<f4"),
        (np.arange(6).reshape(2, 3).T[::-1], "|u1"),  # not contiguous
        (np.zeros((0, 3), np.int64), "|u1"),
    ],
)
def test_an_optional_column_takes_the_smallest_dtype(values: Any, dtype: str) -> None:
    column = Column.of(4, values)
    assert (column.start, column.dtype, column.rows) == (4, dtype, len(values))
    np.testing.assert_array_equal(column.values, np.asarray(values))


def test_optional_columns_line_up_in_a_trajectory() -> None:
    ledger = Ledger()
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
    with pytest.raises(KeyError, match=r"'x'.*routed_experts, top_ids, odd, empty"):
        trajectory.column("x", 0)
    with breaks_law(2, "'odd'", "[(1,), (2,)]"):
        trajectory.column("odd", 0)
    for fill in (256, -1, 0.5, float("nan")):
        with breaks_law(2, fill, "'top_ids'", "uint8"):
            trajectory.column("top_ids", fill)


def test_an_optional_column_without_rows_keeps_its_shape_and_leaves_other_turns_alone() -> None:
    hollow = Ledger()
    hollow.commit(make_draft(None, 0, [1], [2], extras={"empty": Column.of(0, np.zeros((0, 1)))}))
    hollow.commit(make_draft(0, 2, [1], [2], extras={"empty": Column.of(2, np.zeros((0, 2)))}))
    assert hollow.trajectories()[0].column("empty", 0).shape == (4, 1)
    mixed = Ledger()
    mixed.commit(make_draft(None, 0, [100], [], extras={"top_ids": Column.of(1, [])}))
    mixed.commit(make_draft(0, 1, [101], [200], extras={"top_ids": Column.of(2, [[200, 300]])}))
    assert mixed.trajectories()[0].column("top_ids", 0).tolist() == [[0, 0], [0, 0], [200, 300]]
    bare = Ledger()
    bare.commit(make_draft(None, 0, [1], [2]))
    with pytest.raises(KeyError, match=r"'x'.*none"):
        bare.trajectories()[0].column("x", 0)


def test_a_sampling_mask_is_as_wide_as_its_longest_row() -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [1], [2], extras={"sampling_mask": Column.of(1, [[7, 255]])}))
    ledger.commit(make_draft(0, 2, [3], [4], extras={"sampling_mask": Column.of(3, [[8, 9, 254]])}))
    column = ledger.trajectories()[0].column("sampling_mask", -1)
    assert column.tolist() == [[-1, -1, -1], [7, 255, -1], [-1, -1, -1], [8, 9, 254]]
    assert column.dtype == np.int16
