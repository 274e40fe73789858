"""`tito export`: rollouts as a file that a trainer, or any program, reads.

Parquet holds everything that a sample has. The other formats are JSON lines with the field names of one trainer.
`Sample.from_dict` of slime and `AgentLoopOutput.model_validate_json` of verl read a line. TRL's columns are lists
of the lines' values. Each row names its rollout, group, task, sample and agent.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import uuid4

import numpy as np

from strands_tito.export import slime, trl, verl
from strands_tito.export.batch import prompt_response_of
from strands_tito.export.sample import (
    Identity,
    LogprobPolicy,
    SampleImage,
    TrainingSample,
    exported_turns,
    import_optional,
    refuse_images,
    sample_of,
    sampled_mask,
    samples_of,
    trained_tokens,
)
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import count
from tito_core.ledger.turn import REWARD, Finish, Image, Semantics, VersionSpan
from tito_core.store.frames import MAGIC
from tito_core.termination import Termination

if TYPE_CHECKING:
    from datasets import Dataset


_RECORDS = (MAGIC, b'{"format":"strands-tito/')
"""The first bytes of recorded rollouts: of a file of ledgers, and of a collection's index."""
_STDOUT = 1


@contextmanager
def replacing(path: str | PathLike[str]) -> Iterator[Path]:
    """Yield a new file whose content takes the place of `path` when the block ends without an error.

    A link stays: the file that it names is replaced. A pipe, a device and standard output get the content as it is.

    Raises:
        FileNotFoundError: The folder does not exist.
        FileExistsError: The file holds recorded rollouts, as the input of an export does, also through a link.
        IsADirectoryError: It is a folder.
    """
    path = Path(path)
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None and (not stat.S_ISREG(mode) or is_stdout(path)):
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder, "part")
            yield part
            with part.open("rb") as content, os.fdopen(_opened(path), "wb") as out:
                shutil.copyfileobj(content, out)
        return
    target = path.resolve()
    if mode is not None and _start(target).startswith(_RECORDS):
        raise FileExistsError(f"{path} holds recorded rollouts, which would be lost. Write to another file.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"The folder {target.parent} does not exist. Create it, or choose another file.")
    part = target.with_name(f".{target.name[:200]}.{uuid4().hex[:8]}.part")  # no name that a file may have
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def is_stdout(path: str | PathLike[str]) -> bool:
    """Return whether a path names the file or pipe that is this process's standard output."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(_STDOUT))
    except OSError:
        return False


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(max(map(len, _RECORDS)))


def _opened(path: Path) -> int:
    """Open what is not a regular file to write. Standard output is used as it is, so that `>>` appends to its file."""
    return os.dup(_STDOUT) if is_stdout(path) else os.open(path, os.O_WRONLY)


if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = b"strands-tito/samples"
SCHEMA = 3
"""Schema 1 had no images and media_ids, schema 2 no sample and agent."""
_LATER = ("sample", "agent", "images", "media_ids")
"""Columns that files of an older schema do not have."""
ROWS_AT_ONCE = 256
"""Rows per row group, which is also the number of samples held in memory."""


class SamplesSchemaError(ValueError):
    """The file does not hold samples, or has a newer schema than this version reads (law 12)."""


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
    found: pa.Schema = arrow.schema(
        [
            arrow.field("rollout_id", arrow.string(), nullable=False),
            arrow.field("group_id", arrow.string()),
            arrow.field("task_id", arrow.string()),
            arrow.field("sample", arrow.int32()),
            arrow.field("agent", arrow.string()),
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
            arrow.field("turns", arrow.int32(), nullable=False),
            arrow.field("images", arrow.list_(image), nullable=False),
            arrow.field("media_ids", arrow.list_(arrow.int32()), nullable=False),
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
    count = 0
    with replacing(path) as part, parquet.ParquetWriter(part, schema(), **options) as writer:
        for chunk in _chunks(samples):
            writer.write_table(table_of(chunk))
            count += len(chunk)
    return count


def read_parquet(path: str | PathLike[str]) -> Iterator[TrainingSample]:
    """Yield samples equal to those that were written (law 12), with one row group in memory.

    Raises:
        SamplesSchemaError: The file does not hold samples, or has a newer schema.
    """
    parquet = import_optional("pyarrow.parquet", "parquet")
    with parquet.ParquetFile(path) as file:
        _check(file.schema_arrow.metadata or {}, str(path))
        for group in range(file.num_row_groups):
            yield from samples_in(file.read_row_group(group))


def samples_in(table: pa.Table) -> Iterator[TrainingSample]:
    """Yield the samples of an Arrow table that has the columns of `schema()`, in any order; others are ignored.

    Raises:
        SamplesSchemaError: A column is missing, or has values of another type.
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
        columns = {name: numbers[name][index].values for name in numbers}
        yield _sample(
            row, {name: np.asarray(values.to_numpy(zero_copy_only=False)) for name, values in columns.items()}
        )


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
    offsets = np.cumsum([0, *(len(value) for value in values)], dtype=np.int32)
    whole = np.concatenate(values) if values else np.zeros(0)
    missing = np.isnan(whole) if whole.dtype.kind == "f" else None
    return arrow.ListArray.from_arrays(offsets, arrow.array(whole, field.type.value_type, mask=missing))


def _row(sample: TrainingSample) -> dict[str, Any]:
    identity = sample.identity
    return {
        "rollout_id": identity.rollout_id,
        "group_id": identity.group_id,
        "task_id": identity.task_id,
        "sample": identity.sample,
        "agent": identity.agent,
        "trajectory": identity.trajectory,
        "trajectories": identity.trajectories,
        "token_ids": sample.token_ids,
        "prompt_length": sample.prompt_length,
        "loss_mask": sample.loss_mask,
        "logprobs": np.where(sampled_mask(sample), sample.logprobs, np.float32(np.nan)).astype(np.float32),
        "provenance": sample.provenance,
        "versions": [span._asdict() for span in sample.versions],
        "semantics": [
            {name: getattr(meaning, name) for name in ("processed", "temperature", "adjusted", "source")}
            for meaning in sample.semantics
        ],
        "routed_experts": _packed_experts(sample),
        "termination": sample.termination.value,
        "finish": sample.finish.value,
        "reward": sample.reward,
        "turns": sample.turns,
        "images": [
            {"offset": each.offset, "length": each.length}
            | {name: getattr(each.image, name) for name in ("format", "width", "height", "data")}
            for each in sample.images
        ],
        "media_ids": np.array(sample.media_ids, np.int32),
    }


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
    )


PARQUET = "parquet"
Row = dict[str, Any]
Decoder = Callable[[Ledger], slime.Decode]
"""Returns the decoder of a rollout's tokenizer."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What exporters need to know besides the rollouts.

    Attributes:
        temperature: The trainer's logit temperature.
        logprobs: See `LogprobPolicy`.
        branches: What to do with several trajectories where the trainer takes one per rollout; see `sample_of`.
        agent: The agent whose paths are written; see `samples_of` and `sample_of`.
        missing_reward: The reward of rollouts without one: a number; None writes null, for a trainer that computes
            rewards itself; "untrained" writes 0 and masks the row in the formats of slime and verl, whose own code
            fails on null, and null in the others.
        train_constrained: Whether to train tokens that were sampled under a grammar.
        decoder: Returns the decoder of a rollout's tokenizer. Only slime's rows have text.
    """

    decoder: Decoder
    temperature: float = 1.0
    logprobs: LogprobPolicy = "checked"
    branches: Literal["error", "last"] = "error"
    agent: str | None = None
    missing_reward: float | Literal["untrained"] | None = "untrained"
    train_constrained: bool = False


@dataclass(slots=True)
class Written:
    """What was written, and what was left out and why.

    Attributes:
        rows: Rows of the file: trajectories, or rollouts for trainers that take one sample per rollout.
        rollouts: Rollouts that were read.
        without_turns: Rollouts without turns; they have no row.
        without_agent: Rollouts in which the agent made no turn; they have no row.
        without_reward: Rollouts with rows and no reward.
        ended_outside: Rollouts with rows that ended from outside.
        sampled: Sampled tokens of all rollouts.
        trained: Those that the rows train.
        constrained: Those that were sampled under a grammar and are not trained.
        masked: Those of rows that ended from outside, or have no reward, and are not trained.
        elsewhere: Those on paths that have no row, by agent.
    """

    rows: int = 0
    rollouts: int = 0
    without_turns: int = 0
    without_agent: int = 0
    without_reward: int = 0
    ended_outside: int = 0
    sampled: int = 0
    trained: int = 0
    constrained: int = 0
    masked: int = 0
    elsewhere: Counter[str] = field(default_factory=Counter)

    def lines(self, where: str) -> Iterator[str]:
        """Yield sentences about the export: what was written to `where`, the tokens left out, and the rollouts."""
        trained = f"{self.trained:,} of {self.sampled:,} sampled tokens are trained"
        yield f"Wrote {count(self.rows, 'row')} of {count(self.rollouts, 'rollout')} to {where}. {trained}."
        paths = ", ".join(f"{agent} {tokens:,}" for agent, tokens in self.elsewhere.most_common())
        tokens = {
            f"of other paths and agents ({paths})": self.elsewhere.total(),
            "of rows that are not trained": self.masked,
            "sampled under a grammar": self.constrained,
        }
        if any(tokens.values()):
            yield f"Tokens left out: {', '.join(f'{number:,} {why}' for why, number in tokens.items() if number)}."
        rollouts = {
            "without turns (no row)": self.without_turns,
            "without a turn of this agent (no row)": self.without_agent,
            "without a reward": self.without_reward,
            "ended from outside": self.ended_outside,
        }
        if any(rollouts.values()):
            yield f"Rollouts: {', '.join(f'{number:,} {why}' for why, number in rollouts.items() if number)}."


def write(ledgers: Iterable[Ledger], to: str, path: Path, options: ExportOptions) -> Written:
    """Write rollouts to a file, one at a time. Rollouts without turns, or without one of the agent, are left out.

    Args:
        ledgers: The rollouts.
        to: One of `FORMATS`.
        path: The file. An existing one is replaced when all rows are written; see `replacing`.
        options: The options.

    Returns:
        What was written and left out.

    Raises:
        FileNotFoundError, FileExistsError: The folder does not exist, or the file holds recorded rollouts.
        BranchedRolloutError, LogprobMismatchError, ValueError: A rollout cannot be exported. Nothing is written.
    """
    written = Written()
    exports = _exports(ledgers, to, options, written)
    if to == PARQUET:
        written.rows = write_parquet(path, (sample for each in exports for sample in each.samples))
    else:
        written.rows = _write_lines(_ROWS[to](exports, options), path)
    return written


@dataclass(frozen=True, slots=True)
class _Export:
    """The samples of one rollout, and whether its rows are trained."""

    ledger: Ledger
    samples: list[TrainingSample]
    trained: bool


def _exports(ledgers: Iterable[Ledger], to: str, options: ExportOptions, written: Written) -> Iterator[_Export]:
    """Yield the rollouts that have rows, and count all."""
    whole = to in (PARQUET, "slime")
    for ledger in ledgers:
        written.rollouts += 1
        written.sampled += sum(turn.draft.columns.output for turn in ledger)
        if not len(ledger):
            written.without_turns += 1
        elif options.agent is not None and options.agent not in ledger.agents:
            written.without_agent += 1
            _count_elsewhere(ledger, set(), written)
        else:
            yield _counted(_export(ledger, to, options, whole=whole), options, written, last=not whole)


def _export(ledger: Ledger, to: str, options: ExportOptions, *, whole: bool) -> _Export:
    chosen: Any = {"agent": options.agent, "train_constrained": options.train_constrained}
    samples = samples_of(ledger, **chosen) if whole else [sample_of(ledger, branches=options.branches, **chosen)]
    if samples[0].reward is None and isinstance(options.missing_reward, int | float):
        samples = [replace(sample, reward=float(options.missing_reward)) for sample in samples]
    untrained = to in ("slime", "verl") and samples[0].reward is None and options.missing_reward == "untrained"
    if untrained:
        samples = [replace(sample, reward=0.0) for sample in samples]
    return _Export(ledger, samples, not untrained and (to == PARQUET or not samples[0].ended_outside))


def _counted(export: _Export, options: ExportOptions, written: Written, *, last: bool) -> _Export:
    ledger, first = export.ledger, export.samples[0]
    turns = exported_turns(ledger, agent=options.agent, last=last)
    trained = trained_tokens(export.samples)
    written.trained += trained if export.trained else 0
    written.masked += 0 if export.trained else trained
    written.constrained += sum(ledger[turn].draft.columns.output for turn in turns) - trained
    written.without_reward += ledger.annotation(REWARD) is None
    written.ended_outside += first.ended_outside
    _count_elsewhere(ledger, turns, written)
    return export


def _count_elsewhere(ledger: Ledger, turns: set[int], written: Written) -> None:
    for turn in ledger:
        if turn.index not in turns:
            written.elsewhere[turn.draft.agent or "no agent"] += turn.draft.columns.output


def _write_lines(rows: Iterator[Row], path: Path) -> int:
    number = 0
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            number += 1
    return number


def _slime_rows(exports: Iterable[_Export], options: ExportOptions) -> Iterator[Row]:
    """Yield slime's samples. `group_index` numbers the groups in order of appearance, as slime's data source does."""
    index, groups = 0, dict[str, int]()
    for rollout_id, export in enumerate(exports):
        decode = options.decoder(export.ledger)
        for sample in export.samples:
            refuse_images(sample.images, "a JSON line of slime", sample.identity.rollout_id)
            fields = slime.fields_of(sample, decode=decode, temperature=options.temperature, logprobs=options.logprobs)
            fields["remove_sample"] |= not export.trained
            if fields["remove_sample"] and fields["reward"] is None:
                fields["reward"] = 0.0
            status, metadata = slime.STATUS[sample.termination].lower(), slime.metadata_of(sample)
            group = sample.identity.group_id
            number = None if group is None else groups.setdefault(group, len(groups))
            places = {"index": index, "rollout_id": rollout_id, "group_index": number}
            yield {**places, **fields, "status": status, "metadata": metadata}
            index += 1


def _verl_rows(exports: Iterable[_Export], options: ExportOptions) -> Iterator[Row]:
    for export in exports:
        (sample,) = export.samples
        refuse_images(sample.images, "a JSON line of verl", sample.identity.rollout_id)
        parts = prompt_response_of(sample, trainer="verl", temperature=options.temperature, logprobs=options.logprobs)
        if not export.trained:
            parts = replace(parts, mask=[0] * len(parts.mask))
        experts = None if parts.experts is None else parts.experts.tolist()
        yield {**verl.fields_of(parts, sample), "routed_experts": experts}


def _trl_rows(exports: Iterable[_Export], options: ExportOptions) -> Iterator[Row]:
    for export in exports:
        (sample,) = export.samples
        yield trl.row_of(export.ledger, sample, temperature=options.temperature, end_id=0, logprobs=options.logprobs)


_ROWS: Mapping[str, Callable[[Iterable[_Export], ExportOptions], Iterator[Row]]] = MappingProxyType(
    {"slime": _slime_rows, "verl": _verl_rows, "trl": _trl_rows}
)
FORMATS = (PARQUET, *_ROWS)
"""The formats that `tito export --to` takes."""


def dataset_of(samples: Iterable[TrainingSample], **options: Any) -> Dataset:
    """Return samples as a `datasets.Dataset` in memory, one row each. `datasets` can also read `write_parquet`'s files.

    Args:
        samples: Samples of any number of rollouts.
        **options: For `datasets.Dataset`, such as `split`.

    Raises:
        MissingPackageError: datasets is not installed.
    """
    datasets = import_optional("datasets", "datasets")
    return cast("Dataset", datasets.Dataset(table_of(samples), **options))


def samples_of_dataset(dataset: Dataset) -> Iterator[TrainingSample]:
    """Yield the samples of a dataset, equal to those that it was made from; other columns are ignored.

    Raises:
        SamplesSchemaError: The rows are not samples.
    """
    for chunk in dataset.with_format("arrow").iter(batch_size=64):
        yield from samples_in(cast(Any, chunk))
