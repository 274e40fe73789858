"""`tito export`: rollouts as a file that a trainer, or any program, reads.

Parquet holds everything that a sample has. The other formats are JSON lines with the field names of one trainer.
`Sample.from_dict` of slime and `AgentLoopOutput.model_validate_json` of verl read a line. TRL's columns are lists
of the lines' values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from strands_tito.export import slime, trl, verl
from strands_tito.export.images import refuse_images
from strands_tito.export.logprobs import LogprobPolicy
from strands_tito.export.parquet import write_parquet
from strands_tito.export.prompt_response import prompt_response_of
from strands_tito.export.sample import sample_of, samples_of
from tito_core.ledger.ledger import Ledger

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
        train_constrained: Whether to train tokens that were sampled under a grammar.
        decoder: Returns the decoder of a rollout's tokenizer. Only slime's rows have text.
    """

    decoder: Decoder
    temperature: float = 1.0
    logprobs: LogprobPolicy = "checked"
    branches: Literal["error", "last"] = "error"
    train_constrained: bool = False


def write(ledgers: Iterable[Ledger], to: str, path: Path, options: ExportOptions) -> int:
    """Write rollouts to a file, one at a time. Rollouts without turns are left out.

    Args:
        ledgers: The rollouts.
        to: One of `FORMATS`.
        path: The file. An existing one is replaced when all rows are written.
        options: The options.

    Returns:
        The number of rows: trajectories, or rollouts for trainers that take one sample per rollout.

    Raises:
        BranchedRolloutError, LogprobMismatchError, ValueError: A rollout cannot be exported. Nothing is written.
    """
    part = path.with_name(f"{path.name}.part")
    filled = (ledger for ledger in ledgers if len(ledger))
    try:
        count = (
            _write_parquet(filled, part, options) if to == PARQUET else _write_lines(_ROWS[to](filled, options), part)
        )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def _write_parquet(ledgers: Iterable[Ledger], path: Path, options: ExportOptions) -> int:
    constrained = options.train_constrained
    return write_parquet(
        path, (sample for ledger in ledgers for sample in samples_of(ledger, train_constrained=constrained))
    )


def _write_lines(rows: Iterator[Row], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            count += 1
    return count


def _slime_rows(ledgers: Iterable[Ledger], options: ExportOptions) -> Iterator[Row]:
    index = 0
    for rollout_id, ledger in enumerate(ledgers):
        decode = options.decoder(ledger)
        for sample in samples_of(ledger, train_constrained=options.train_constrained):
            refuse_images(sample.images, "a JSON line of slime", sample.identity.rollout_id)
            fields = slime.fields_of(sample, decode=decode, temperature=options.temperature, logprobs=options.logprobs)
            status, metadata = slime.STATUS[sample.termination].lower(), slime.metadata_of(sample)
            yield {"index": index, "rollout_id": rollout_id, **fields, "status": status, "metadata": metadata}
            index += 1


def _verl_rows(ledgers: Iterable[Ledger], options: ExportOptions) -> Iterator[Row]:
    for ledger in ledgers:
        sample = sample_of(ledger, branches=options.branches, train_constrained=options.train_constrained)
        refuse_images(sample.images, "a JSON line of verl", sample.identity.rollout_id)
        parts = prompt_response_of(sample, trainer="verl", temperature=options.temperature, logprobs=options.logprobs)
        experts = None if parts.experts is None else parts.experts.tolist()
        yield {**verl.fields_of(parts, sample), "routed_experts": experts}


def _trl_rows(ledgers: Iterable[Ledger], options: ExportOptions) -> Iterator[Row]:
    for ledger in ledgers:
        columns = trl.columns_of(
            [ledger], temperature=options.temperature, end_id=0, branches=options.branches,
            logprobs=options.logprobs, train_constrained=options.train_constrained,
        )  # fmt: skip
        yield {name: None if column is None else column[0] for name, column in columns.items()}


_ROWS: Mapping[str, Callable[[Iterable[Ledger], ExportOptions], Iterator[Row]]] = MappingProxyType(
    {"slime": _slime_rows, "verl": _verl_rows, "trl": _trl_rows}
)
FORMATS = (PARQUET, *_ROWS)
"""The formats that `tito export --to` takes."""
