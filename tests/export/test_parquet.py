"""Parquet: what we write reads back equal, with our reader and others; a newer file is refused."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_tito.export import Identity, TrainingSample, parquet, samples_of
from strands_tito.export.kept import KeptSets
from strands_tito.export.parquet import SamplesSchemaError, read_parquet, samples_in, schema, table_of, write_parquet
from strands_tito.export.sample import sampled_mask
from strands_tito.inspect.score import Scores
from support.rollout_forests import chain, rollouts
from support.trainer_packages import run
from tito_core.ledger import Ledger
from tito_core.ledger.turn import Semantics, VocabularyCheck

sets = st.lists(rollouts(most_turns=4), min_size=0, max_size=3)


def same(one: TrainingSample, other: TrainingSample) -> bool:
    for name in TrainingSample.__slots__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            assert isinstance(right, np.ndarray)
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
        else:
            assert (type(left), left) == (type(right), right), name
    return True


@settings(max_examples=15)
@given(sets)
def test_samples_come_back_equal(ledgers: list[Ledger]) -> None:
    samples = [sample for ledger in ledgers for sample in samples_of(ledger)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.parquet"
        assert write_parquet(path, iter(samples)) == len(samples)
        assert all(same(a, b) for a, b in zip(samples, read_parquet(path), strict=True))
        table = pq.read_table(path)  # any reader's view
    assert table.schema.equals(schema())
    assert table.num_rows == len(samples)
    table.validate(full=True)
    for row, sample in zip(table.to_pylist(), samples, strict=True):
        assert row["token_ids"] == sample.token_ids.tolist()
        known = sampled_mask(sample)
        assert [value is not None for value in row["logprobs"]] == known.tolist()
        assert row["reward"] == sample.reward
        assert row["credit"] == (None if sample.credit is None else sample.credit.tolist())
        assert row["termination"] == sample.termination


@settings(max_examples=15)
@given(sets, st.integers(1, 3))
def test_rows_are_written_in_groups(ledgers: list[Ledger], size: int) -> None:
    samples = [sample for ledger in ledgers for sample in samples_of(ledger)]
    before, parquet.ROWS_AT_ONCE = parquet.ROWS_AT_ONCE, size
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rollouts.parquet"
            write_parquet(path, iter(samples))
            assert pq.ParquetFile(path).num_row_groups == -(-len(samples) // size)
            assert all(same(a, b) for a, b in zip(samples, read_parquet(path), strict=True))
    finally:
        parquet.ROWS_AT_ONCE = before


def test_a_table_in_memory_is_sliced_and_read() -> None:
    samples = [sample for size in (1, 2, 3) for sample in samples_of(chain((2, size)))]
    table = table_of(samples)
    assert same(next(samples_in(table.slice(1, 1))), samples[1])


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[pa.Table], pa.Table]:
    """Change the value that a column has in the first row."""

    def edit(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        column = pa.array([change(values[0]), *values[1:]], table.schema.field(name).type)
        return table.drop_columns([name]).append_column(name, [column])

    return edit


def rich(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Add the columns that few rollouts have."""
    full = []
    for sample in samples:
        n = len(sample)
        kept = KeptSets(np.zeros(0, np.int32), np.zeros(n + 1, np.int32), np.ones((n, 2), np.float32))
        scores = Scores(np.zeros(n, np.float32), "m", None, VocabularyCheck.TOKENIZE, Semantics(False, 1.0, False, "m"))
        experts = np.zeros((n, 1, 2), np.int16)
        full.append(replace(sample, kept=kept, scores={"teacher": scores}, routed_experts=experts))
    return full


def test_added_and_reordered_columns_do_no_harm(tmp_path: Path) -> None:
    samples = [sample for size in (1, 2) for sample in samples_of(chain((2, size)))]
    table = table_of(samples).append_column("advantage", [[0.5, -0.5]])
    table = table.select(sorted(table.column_names)).replace_schema_metadata(schema().metadata)
    assert all(same(a, b) for a, b in zip(samples, samples_in(table), strict=True))
    pq.write_table(table, tmp_path / "more.parquet")
    assert all(same(a, b) for a, b in zip(samples, read_parquet(tmp_path / "more.parquet"), strict=True))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda table: table.drop_columns(["token_ids", "reward"]), "no token_ids, reward"),
        (lambda table: table.set_column(0, "rollout_id", [[None, None]]), "rollout_id|null"),
        (lambda table: table.drop_columns(["turns"]).append_column("turns", [["x", "y"]]), "'[xy]'"),
        (lambda table: table.drop_columns(["loss_mask"]).append_column("loss_mask", [[[1], [1]]]), "'loss_mask': 1"),
        (lambda table: table.drop_columns(["credit"]).append_column("credit", [[[1, None, 0], None]]), "'credit': 2"),
        (changed("scores", lambda value: [{**value[0], "logprobs": [0.0]}]), "'scores teacher': 1"),
        (changed("routed_experts", lambda value: {**value, "rows": value["rows"][:-1]}), "buffer size"),
        (changed("routed_experts", lambda value: {**value, "rows": value["rows"][:-4]}), "'routed_experts': 2"),
        (changed("kept", lambda value: {**value, "offsets": value["offsets"][:-1]}), "'kept': 2"),
        (changed("kept", lambda value: {**value, "mass_low": [0.0]}), "inhomogeneous"),
        (changed("termination", lambda _: "bored"), "'bored' is not a valid Termination"),
    ],
)
def test_rows_that_are_not_samples_say_why(change: Any, named: str) -> None:
    table = table_of(rich([sample for size in (1, 2) for sample in samples_of(chain((2, size)))]))
    with pytest.raises(SamplesSchemaError, match=rf"rows are not samples: .*({named})"):
        next(samples_in(change(table)))


def test_a_file_can_be_written_from_its_own_samples(tmp_path: Path) -> None:
    """They are read while they are written."""
    path, samples = tmp_path / "rollouts.parquet", samples_of(chain((2, 2)))
    write_parquet(path, samples)
    assert write_parquet(path, read_parquet(path)) == 1
    assert all(same(a, b) for a, b in zip(samples, read_parquet(path), strict=True))


@pytest.mark.parametrize(
    ("metadata", "values"),
    [
        ({b"format": b"strands-tito/samples", b"schema": b"6"}, "schema 6.* up to 5.*upgrade"),
        ({b"format": b"strands-tito/samples"}, r"keys are \[b'format'\]"),
        ({b"schema": b"1"}, r"keys are \[b'schema'\]"),
        (None, r"keys are \[\]"),
    ],
)
def test_another_file_and_a_newer_one_are_refused(tmp_path: Path, metadata: Any, values: str) -> None:
    table = table_of(samples_of(chain((2, 2)))).replace_schema_metadata(metadata)
    pq.write_table(table, tmp_path / "other.parquet")
    with pytest.raises(SamplesSchemaError, match=rf"other\.parquet.*{values}"):
        next(read_parquet(tmp_path / "other.parquet"))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.parquet"
    write_parquet(path, rich([sample for size in (1, 2) for sample in samples_of(chain((2, size)))]))
    whole, group = path.read_bytes(), pq.ParquetFile(path).metadata.row_group(0)
    damaged = [whole[:length] for length in range(0, len(whole), 97)]
    for number in range(group.num_columns):
        column = group.column(number)
        last = column.data_page_offset + column.total_compressed_size - 1
        if column.dictionary_page_offset is not None:
            last += column.dictionary_page_offset - column.data_page_offset
        damaged.append(whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :])
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(SamplesSchemaError, match=r"rollouts\.parquet"):
            list(read_parquet(path))


def test_every_column_is_described() -> None:
    described = re.findall(r"^ +(\w+): ", f"{TrainingSample.__doc__}{Identity.__doc__}", re.MULTILINE)
    assert set(schema().names) <= set(described)


def test_types_are_arrows_own() -> None:
    assert schema().field("token_ids").type == pa.list_(pa.int32())
    assert schema().metadata == {b"format": b"strands-tito/samples", b"schema": b"5"}


@pytest.mark.trainers
@pytest.mark.parametrize("data", ["newest", "lowest"])
def test_datasets_and_torch_take_them(data: str) -> None:
    output = run("generic_check.py", data)
    assert output.splitlines()[-1].startswith("generic: ok, ")
