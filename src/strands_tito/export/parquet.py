"""Samples in Parquet files: one row a trajectory, with everything that a sample has (law 12)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING, Any

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
_LATER = ("sample", "agent", "images", "media_ids", "kept", "scores", "turn", "credit")
"""Columns that files of an older schema do not have."""
_MASS = ("mass_low", "mass_high")
ROWS_AT_ONCE = 256
"""Rows per row group, which is also the number of samples held in memory."""


class SamplesSchemaError(TITOError, ValueError):
    """The file does not hold samples, or has a newer schema than this version reads (law 12)."""


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
    """Return the Arrow schema. docs/trainers.md describes each column.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    arrow = import_optional("pyarrow", "parquet")
    span = arrow.struct([("start", arrow.int32()), ("stop", arrow.int32()), ("version", arrow.string())])
    meaning = arrow.struct(
        [
            ("processed", arrow.bool_()),
            ("temperature", arrow.float64()),
            ("adjusted", arrow.bool_()),
            ("source", arrow.string()),
        ]
    )
    experts = arrow.struct(
        [("dtype", arrow.string()), ("layers", arrow.int32()), ("experts", arrow.int32()), ("rows", arrow.binary())]
    )
    ids = arrow.list_(arrow.int32())
    kept = arrow.struct([("ids", ids), ("offsets", ids), *((name, arrow.list_(arrow.float32())) for name in _MASS)])
    image = arrow.struct(
        [
            ("offset", arrow.int32()),
            ("length", arrow.int32()),
            ("format", arrow.string()),
            ("width", arrow.int32()),
            ("height", arrow.int32()),
            ("data", arrow.binary()),
        ]
    )
    scores = arrow.struct(
        [
            ("column", arrow.string()),
            ("logprobs", arrow.list_(arrow.float32())),
            ("model", arrow.string()),
            ("weight_version", arrow.string()),
            ("vocabulary", arrow.string()),
            ("semantics", meaning),
        ]
    )
    found: pa.Schema = arrow.schema(
        [
            arrow.field("rollout_id", arrow.string(), nullable=False),
            arrow.field("group_id", arrow.string()),
            arrow.field("task_id", arrow.string()),
            arrow.field("sample", arrow.int32()),
            arrow.field("agent", arrow.string()),
            arrow.field("turn", arrow.int32()),
            arrow.field("trajectory", arrow.int32(), nullable=False),
            arrow.field("trajectories", arrow.int32(), nullable=False),
            arrow.field("token_ids", arrow.list_(arrow.int32()), nullable=False),
            arrow.field("prompt_length", arrow.int32(), nullable=False),
            arrow.field("loss_mask", arrow.list_(arrow.uint8()), nullable=False),
            arrow.field("logprobs", arrow.list_(arrow.float32()), nullable=False),
            arrow.field("provenance", arrow.list_(arrow.uint8()), nullable=False),
            arrow.field("versions", arrow.list_(span), nullable=False),
            arrow.field("semantics", arrow.list_(meaning), nullable=False),
            arrow.field("routed_experts", experts),
            arrow.field("termination", arrow.string(), nullable=False),
            arrow.field("finish", arrow.string(), nullable=False),
            arrow.field("reward", arrow.float64()),
            arrow.field("credit", arrow.list_(arrow.float64())),
            arrow.field("turns", arrow.int32(), nullable=False),
            arrow.field("images", arrow.list_(image), nullable=False),
            arrow.field("media_ids", arrow.list_(arrow.int32()), nullable=False),
            arrow.field("kept", kept),
            arrow.field("scores", arrow.list_(scores), nullable=False),
        ],
        metadata={b"format": FORMAT, b"schema": str(SCHEMA).encode()},
    )
    return found


def table_of(samples: Iterable[TrainingSample]) -> pa.Table:
    """Return samples as an Arrow table, one row each. Logprobs are null on tokens that the engine did not sample."""
    arrow, columns_schema = import_optional("pyarrow", "parquet"), schema()
    rows = [_row(sample) for sample in samples]
    columns = {name: [row[name] for row in rows] for name in columns_schema.names}
    arrays = [_array(arrow, columns[field.name], field) for field in columns_schema]
    table: pa.Table = arrow.Table.from_arrays(arrays, schema=columns_schema)
    return table


def samples_in(table: pa.Table) -> Iterator[TrainingSample]:
    """Yield the samples of an Arrow table that has the columns of `schema()`, in any order; others are ignored.

    Raises:
        SamplesSchemaError: A column is missing, or has values of another type or meaning, or a row's columns of tokens
            have different lengths.
    """
    arrow = import_optional("pyarrow", "parquet")
    own = [field for field in schema() if field.name in table.column_names]
    if missing := [name for name in schema().names if name not in table.column_names and name not in _LATER]:
        raise SamplesSchemaError(f"The rows are not samples: they have no {', '.join(missing)}.")
    try:
        table = table.select([field.name for field in own]).cast(arrow.schema(own))
    except (arrow.ArrowException, ValueError) as error:
        raise SamplesSchemaError(f"The rows are not samples: {error}") from error
    numbers = {
        name: table.column(name).combine_chunks() for name in ("token_ids", "loss_mask", "logprobs", "provenance")
    }
    plain = table.drop_columns([*numbers])
    for index, row in enumerate(plain.to_pylist()):
        columns = {name: numbers[name][index].values.to_numpy(zero_copy_only=False) for name in numbers}
        try:
            sample = _sample(row, columns)
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


def _row(sample: TrainingSample) -> dict[str, Any]:
    identity = sample.identity
    return {
        "rollout_id": identity.rollout_id,
        "group_id": identity.group_id,
        "task_id": identity.task_id,
        "sample": identity.sample,
        "agent": identity.agent,
        "turn": identity.turn,
        "trajectory": identity.trajectory,
        "trajectories": identity.trajectories,
        "token_ids": sample.token_ids,
        "prompt_length": sample.prompt_length,
        "loss_mask": sample.loss_mask,
        "logprobs": np.where(sampled_mask(sample), sample.logprobs, np.float32(np.nan)).astype(np.float32),
        "provenance": sample.provenance,
        "versions": [span._asdict() for span in sample.versions],
        "semantics": [_meaning(semantics) for semantics in sample.semantics],
        "routed_experts": _packed_experts(sample),
        "termination": sample.termination.value,
        "finish": sample.finish.value,
        "reward": sample.reward,
        "credit": sample.credit,
        "turns": sample.turns,
        "images": [
            {"offset": each.offset, "length": each.length}
            | {name: getattr(each.image, name) for name in ("format", "width", "height", "data")}
            for each in sample.images
        ],
        "media_ids": np.array(sample.media_ids, np.int32),
        "kept": None
        if sample.kept is None
        else {
            "ids": sample.kept.ids,
            "offsets": sample.kept.offsets,
            **dict(zip(_MASS, sample.kept.mass.T, strict=True)),
        },
        "scores": [
            {"column": column, "model": each.model, "weight_version": each.weight_version}
            | {"vocabulary": each.vocabulary.value, "semantics": _meaning(each.semantics), "logprobs": each.logprobs}
            for column, each in sample.scores.items()
        ],
    }


def _meaning(semantics: Semantics) -> dict[str, Any]:
    return {name: getattr(semantics, name) for name in ("processed", "temperature", "adjusted", "source")}


def _scores(row: dict[str, Any]) -> Scores:
    return Scores(
        np.array(row["logprobs"], np.float32),
        row["model"],
        row["weight_version"],
        VocabularyCheck(row["vocabulary"]),
        Semantics(**row["semantics"]),
    )


def _packed_experts(sample: TrainingSample) -> dict[str, Any] | None:
    rows = sample.routed_experts
    if rows is None:
        return None
    little = rows.astype(rows.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "layers": rows.shape[1], "experts": rows.shape[2], "rows": little.tobytes()}


def _sample(row: dict[str, Any], columns: dict[str, Any]) -> TrainingSample:
    experts = row["routed_experts"]
    identity: dict[str, Any] = {field.name: row.get(field.name) for field in fields(Identity)}  # older files have fewer
    if experts is not None:
        shape = (-1, experts["layers"], experts["experts"])
        experts = np.frombuffer(experts["rows"], experts["dtype"]).reshape(shape)
    return TrainingSample(
        identity=Identity(**identity),
        token_ids=columns["token_ids"].astype(np.int32, copy=False),
        prompt_length=row["prompt_length"],
        loss_mask=columns["loss_mask"].astype(np.int64),
        logprobs=columns["logprobs"].astype(np.float32, copy=False),
        provenance=columns["provenance"].astype(np.uint8, copy=False),
        versions=tuple(VersionSpan(**span) for span in row["versions"]),
        semantics=tuple(Semantics(**meaning) for meaning in row["semantics"]),
        routed_experts=experts,
        termination=Termination(row["termination"]),
        finish=Finish(row["finish"]),
        reward=row["reward"],
        turns=row["turns"],
        images=tuple(
            SampleImage(
                each["offset"],
                each["length"],
                Image(each["data"], each["format"], each["width"], each["height"]),
            )
            for each in row.get("images", ())
        ),
        media_ids=tuple(row.get("media_ids", ())),
        kept=_kept(row.get("kept")),
        scores={each["column"]: _scores(each) for each in row.get("scores", ())},
        credit=None if row.get("credit") is None else np.array(row["credit"], np.float64),
    )


def _kept(row: dict[str, Any] | None) -> KeptSets | None:
    if row is None:
        return None
    mass = np.array([row[name] for name in _MASS], np.float32).T
    return KeptSets(np.array(row["ids"], np.int32), np.array(row["offsets"], np.int32), mass)
