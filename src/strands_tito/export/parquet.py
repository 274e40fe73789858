"""Samples in Parquet files: one row a trajectory, with everything that a sample has (law 12)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strands_tito.export.kept import KeptSets
from strands_tito.export.output_file import replacing
from strands_tito.export.sample import Identity, SampleImage, TrainingSample, sampled_mask
from strands_tito.export.trainer import import_optional
from strands_tito.inspect.score import Scores
from tito_core.ledger.errors import TITOError
from tito_core.ledger.turn import Finish, Image, Semantics, VersionSpan, VocabularyCheck
from tito_core.termination import Termination

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = b"strands-tito/samples"
SCHEMA = 5
"""Schema 1 had no images and media_ids, schema 2 no sample and agent, 3 no kept and scores, 4 no turn and credit."""
ROWS_AT_ONCE = 256
"""Rows per row group, which is also the number of samples held in memory."""


class SamplesSchemaError(TITOError, ValueError):
    """The file does not hold samples, or has a newer schema than this version reads (law 12)."""


class _Column(NamedTuple):
    """A column of the file, with the name of the field of `TrainingSample` or `Identity` that it holds.

    Attributes:
        kind: Its Arrow type: a name, a list with the type of its items, or a dict of fields.
        written: Returns what the file has for the field's value.
        read: Returns the field's value for what the file has.
        is_required: Whether it is never null.
        is_new: Whether files of an older schema lack it; the field then has its default value.
    """

    kind: Any
    written: Callable[[Any], Any] = lambda value: value
    read: Callable[[Any], Any] = lambda value: value
    is_required: bool = False
    is_new: bool = False


def _fields_of(names: Iterable[str]) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: getattr(value, name) for name in names}


def _each(convert: Callable[[Any], Any], into: Callable[[Iterable[Any]], Any] = list) -> Callable[[Any], Any]:
    return lambda values: into(convert(value) for value in values)


def _unless_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _array_of(dtype: Any) -> Callable[[Any], Any]:
    return lambda values: np.asarray(values, dtype)


_SPAN = {"start": "int32", "stop": "int32", "version": "string"}
_MEANING = {"processed": "bool_", "temperature": "float64", "adjusted": "bool_", "source": "string"}
_FILE = {"format": "string", "width": "int32", "height": "int32", "data": "binary"}
_IMAGE = {"offset": "int32", "length": "int32", **_FILE}
_EXPERTS = {"dtype": "string", "layers": "int32", "experts": "int32", "rows": "binary"}
_KEPT = {"ids": ["int32"], "offsets": ["int32"], "mass_low": ["float32"], "mass_high": ["float32"]}
_SCORES = {
    **{"column": "string", "logprobs": ["float32"], "model": "string", "weight_version": "string"},
    **{"vocabulary": "string", "semantics": _MEANING},
}
_meaning = _fields_of(_MEANING)


def _packed_experts(rows: Any) -> dict[str, Any]:
    little = rows.astype(rows.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "layers": rows.shape[1], "experts": rows.shape[2], "rows": little.tobytes()}


def _experts(row: dict[str, Any]) -> Any:
    return np.frombuffer(row["rows"], row["dtype"]).reshape(-1, row["layers"], row["experts"])


def _image(row: dict[str, Any]) -> SampleImage:
    return SampleImage(row["offset"], row["length"], Image(**{name: row[name] for name in _FILE}))


def _packed_kept(kept: KeptSets) -> dict[str, Any]:
    return {"ids": kept.ids, "offsets": kept.offsets, "mass_low": kept.mass[:, 0], "mass_high": kept.mass[:, 1]}


def _kept(row: dict[str, Any]) -> KeptSets:
    mass = np.array([row["mass_low"], row["mass_high"]], np.float32).T
    return KeptSets(np.array(row["ids"], np.int32), np.array(row["offsets"], np.int32), mass)


def _packed_scores(scores: dict[str, Scores]) -> list[dict[str, Any]]:
    return [
        {"column": column, "logprobs": each.logprobs, "model": each.model, "weight_version": each.weight_version}
        | {"vocabulary": each.vocabulary.value, "semantics": _meaning(each.semantics)}
        for column, each in scores.items()
    ]


def _scores(rows: Iterable[dict[str, Any]]) -> dict[str, Scores]:
    return {
        row["column"]: Scores(
            np.array(row["logprobs"], np.float32),
            row["model"],
            row["weight_version"],
            VocabularyCheck(row["vocabulary"]),
            Semantics(**row["semantics"]),
        )
        for row in rows
    }


_COLUMNS = {
    "rollout_id": _Column("string", is_required=True),
    "group_id": _Column("string"),
    "task_id": _Column("string"),
    "sample": _Column("int32", is_new=True),
    "agent": _Column("string", is_new=True),
    "turn": _Column("int32", is_new=True),
    "trajectory": _Column("int32", is_required=True),
    "trajectories": _Column("int32", is_required=True),
    "token_ids": _Column(["int32"], read=_array_of(np.int32), is_required=True),
    "prompt_length": _Column("int32", is_required=True),
    "loss_mask": _Column(["uint8"], read=_array_of(np.int64), is_required=True),
    "logprobs": _Column(["float32"], read=_array_of(np.float32), is_required=True),
    "provenance": _Column(["uint8"], read=_array_of(np.uint8), is_required=True),
    "versions": _Column(
        [_SPAN], _each(VersionSpan._asdict), _each(lambda row: VersionSpan(**row), tuple), is_required=True
    ),
    "semantics": _Column([_MEANING], _each(_meaning), _each(lambda row: Semantics(**row), tuple), is_required=True),
    "routed_experts": _Column(_EXPERTS, _unless_none(_packed_experts), _unless_none(_experts)),
    "termination": _Column("string", str, Termination, is_required=True),
    "finish": _Column("string", str, Finish, is_required=True),
    "reward": _Column("float64"),
    "credit": _Column(["float64"], read=_unless_none(_array_of(np.float64)), is_new=True),
    "turns": _Column("int32", is_required=True),
    "images": _Column(
        [_IMAGE],
        _each(lambda each: {"offset": each.offset, "length": each.length, **_fields_of(_FILE)(each.image)}),
        _each(_image, tuple),
        is_required=True,
        is_new=True,
    ),
    "media_ids": _Column(["int32"], _array_of(np.int32), tuple, is_required=True, is_new=True),
    "kept": _Column(_KEPT, _unless_none(_packed_kept), _unless_none(_kept), is_new=True),
    "scores": _Column([_SCORES], _packed_scores, _scores, is_required=True, is_new=True),
}
"""Everything that a sample has, in the file's order."""
_NUMBERS = ("token_ids", "loss_mask", "logprobs", "provenance")
"""Columns that are read without a Python object for each token."""
_IDENTITY = tuple(field.name for field in fields(Identity))


def write_parquet(path: str | PathLike[str], samples: Iterable[TrainingSample], **options: Any) -> int:
    """Write samples to a file one row group at a time, with at most `ROWS_AT_ONCE` of them in memory.

    Args:
        path: The file. An existing one is replaced when all rows are written; see `replacing`.
        samples: Samples of any number of rollouts.
        **options: For `pyarrow.parquet.ParquetWriter`, such as `compression`.

    Returns:
        The number of rows.
    """
    parquet = import_optional("pyarrow.parquet", "parquet")
    count, options = 0, {"write_page_checksum": True, **options}  # without them damaged values are read as others
    with replacing(path) as part, parquet.ParquetWriter(part, schema(), **options) as writer:
        for chunk in _chunks(samples):
            writer.write_table(table_of(chunk))
            count += len(chunk)
    return count


def read_parquet(path: str | PathLike[str]) -> Iterator[TrainingSample]:
    """Yield samples equal to those that were written (law 12), with one row group in memory.

    Raises:
        FileNotFoundError: The file does not exist.
        SamplesSchemaError: The file is damaged, does not hold samples, or has a newer schema.
    """
    parquet, arrow = import_optional("pyarrow.parquet", "parquet"), import_optional("pyarrow", "parquet")
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _check(file.schema_arrow.metadata or {}, str(path))
            for group in range(file.num_row_groups):
                yield from samples_in(file.read_row_group(group))
    except (arrow.ArrowException, UnicodeDecodeError, OSError) as damage:
        if isinstance(damage, OSError) and damage.errno is not None:  # of the system, not of Arrow
            raise
        raise SamplesSchemaError(f"{path} cannot be read as Parquet ({damage}): export the rollouts again.") from damage


def schema() -> pa.Schema:
    """Return the Arrow schema. Its columns are the fields of `TrainingSample` and `Identity` by name.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    arrow = import_optional("pyarrow", "parquet")

    def type_of(kind: Any) -> Any:
        if isinstance(kind, str):
            return getattr(arrow, kind)()
        if isinstance(kind, list):
            return arrow.list_(type_of(kind[0]))
        return arrow.struct([(name, type_of(each)) for name, each in kind.items()])

    columns = [arrow.field(name, type_of(one.kind), nullable=not one.is_required) for name, one in _COLUMNS.items()]
    found: pa.Schema = arrow.schema(columns, metadata={b"format": FORMAT, b"schema": str(SCHEMA).encode()})
    return found


def table_of(samples: Iterable[TrainingSample]) -> pa.Table:
    """Return samples as an Arrow table, one row each. Logprobs are null on tokens that the engine did not sample."""
    arrow, own = import_optional("pyarrow", "parquet"), schema()
    values: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for sample in samples:
        for name, column in _COLUMNS.items():
            values[name].append(column.written(getattr(sample.identity if name in _IDENTITY else sample, name)))
        values["logprobs"][-1] = np.where(sampled_mask(sample), sample.logprobs, np.float32(np.nan))
    table: pa.Table = arrow.Table.from_arrays([_array(arrow, values[field.name], field) for field in own], schema=own)
    return table


def samples_in(table: pa.Table) -> Iterator[TrainingSample]:
    """Yield the samples of an Arrow table that has the columns of `schema()`, in any order; others are ignored.

    Raises:
        SamplesSchemaError: A column is missing, or has values of another type or meaning, or a row's columns of tokens
            have different lengths.
    """
    arrow = import_optional("pyarrow", "parquet")
    own = [field for field in schema() if field.name in table.column_names]
    if missing := [name for name, one in _COLUMNS.items() if name not in table.column_names and not one.is_new]:
        raise SamplesSchemaError(f"The rows are not samples: they have no {', '.join(missing)}.")
    try:
        table = table.select([field.name for field in own]).cast(arrow.schema(own))
    except (arrow.ArrowException, ValueError) as error:
        raise SamplesSchemaError(f"The rows are not samples: {error}") from error
    numbers = {name: table.column(name).combine_chunks() for name in _NUMBERS}
    plain = table.drop_columns([*numbers])
    for index, row in enumerate(plain.to_pylist()):
        columns = {name: numbers[name][index].values.to_numpy(zero_copy_only=False) for name in numbers}
        try:
            sample = _sample(row | columns)
            lengths = {name: len(values) for name, values in columns.items()} | _lengths(sample)
        except (TypeError, ValueError) as error:
            raise SamplesSchemaError(f"The rows are not samples: {error}.") from error
        if len(set(lengths.values())) > 1:
            raise SamplesSchemaError(f"The rows are not samples: columns of tokens have unequal lengths, {lengths}.")
        yield sample


def _lengths(sample: TrainingSample) -> dict[str, int]:
    """Return the number of tokens for which a sample's optional columns have values."""
    found: dict[str, Any] = {f"scores {column}": each.logprobs for column, each in sample.scores.items()}
    found["routed_experts"] = sample.routed_experts
    if sample.credit is not None:
        found["credit"] = sample.credit[~np.isnan(sample.credit)]
    if sample.kept is not None:
        found |= {"kept": sample.kept.counts, "mass": sample.kept.mass}
    return {name: len(values) for name, values in found.items() if values is not None}


def _check(metadata: dict[bytes, bytes], path: str) -> None:
    version = metadata.get(b"schema", b"")
    if metadata.get(b"format") != FORMAT or not version.isdigit():
        raise SamplesSchemaError(
            f"{path} was not written by write_parquet: its metadata keys are {sorted(metadata)}, format and schema "
            "are missing or invalid."
        )
    if int(version) > SCHEMA:
        raise SamplesSchemaError(
            f"{path} has schema {int(version)}, this version reads up to {SCHEMA}: upgrade strands-tito to read it."
        )


def _chunks(samples: Iterable[TrainingSample]) -> Iterator[list[TrainingSample]]:
    chunk: list[TrainingSample] = []
    for sample in samples:
        chunk.append(sample)
        if len(chunk) == ROWS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _array(arrow: Any, values: list[Any], field: Any) -> Any:
    """Build a column. Per-token columns are built from NumPy arrays, without a Python object for each token."""
    if not (arrow.types.is_list(field.type) and arrow.types.is_primitive(field.type.value_type)):
        return arrow.array(values, field.type)
    lists = [np.zeros(0) if value is None else value for value in values]
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int32)
    whole = np.concatenate(lists) if lists else np.zeros(0)
    missing = np.isnan(whole) if whole.dtype.kind == "f" else None
    nulls = arrow.array([value is None for value in values], arrow.bool_()) if field.nullable else None
    return arrow.ListArray.from_arrays(
        arrow.array(offsets), arrow.array(whole, field.type.value_type, mask=missing), mask=nulls
    )


def _sample(row: dict[str, Any]) -> TrainingSample:
    values = {name: _COLUMNS[name].read(value) for name, value in row.items()}
    identity = {name: values.pop(name) for name in _IDENTITY if name in values}  # older files have fewer
    return TrainingSample(identity=Identity(**identity), **values)
