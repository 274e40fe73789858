"""`tito export`: rollouts as a file that a trainer, or any program, reads.

Parquet holds everything that a sample has. The other formats are JSON lines with the field names of one trainer.
`Sample.from_dict` of slime and `AgentLoopOutput.model_validate_json` of verl read a line. TRL's columns are lists
of the lines' values. Each row names its rollout, group, task, sample and agent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from strands_tito.export import slime, trl, verl
from strands_tito.export.output_file import replacing
from strands_tito.export.parquet import write_parquet
from strands_tito.export.sample import (
    TrainingSample,
    by_agent,
    credits_of,
    exported_turns,
    left_out,
    sample_of,
    samples_of,
    total_of,
    trained_tokens,
)
from strands_tito.export.trainer import Decode, LogprobPolicy, prompt_response_of, refuse_images
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import count

PARQUET = "parquet"
_NO_SETS: Mapping[str, tuple[Any, ...]] = {"replays": (False,)}
_TAKES: Mapping[str, tuple[str, Mapping[str, tuple[Any, ...]]]] = {
    PARQUET: (
        "holds each path as it was recorded, and what its logprobs mean",
        {"branches": ("list",), "logprobs": ("checked", "as-recorded"), "temperature": (1.0,), **_NO_SETS},
    ),
    "slime": ("has a row for each path", {"branches": ("list",)}),
    "verl": ("has no place for kept sets", _NO_SETS),
    "trl": ("has no place for kept sets", _NO_SETS),
}
"""Of each format why it ignores options, and the values that change nothing: others are refused."""

Row = dict[str, Any]
Decoder = Callable[[Ledger], Decode]
"""Returns the decoder of a rollout's tokenizer."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What exporters need to know besides the rollouts.

    Attributes:
        temperature: The trainer's logit temperature.
        logprobs: See `LogprobPolicy`.
        branches: "list" writes a row for each trajectory; "last" and "error" write one row a rollout, for verl and
            trl; see `sample_of`.
        agent: The agent whose paths are written; see `samples_of` and `sample_of`.
        missing_reward: The reward of rollouts without one: a number; None writes null, for a trainer that computes
            rewards itself; "untrained" writes 0 and masks the row in the formats of slime and verl, whose own code
            fails on null, and null in the others.
        train_constrained: Whether to train tokens that were sampled under a grammar.
        replays: Whether slime replays kept sets; see `top_p_replay` of `slime.fields_of`.
        max_paths: The most rows of a rollout, with "list"; see `samples_of`.
        decoder: Returns the decoder of a rollout's tokenizer. Only slime's rows have text.
    """

    decoder: Decoder
    temperature: float = 1.0
    logprobs: LogprobPolicy = "checked"
    branches: Literal["list", "last", "error"] = "list"
    agent: str | None = None
    missing_reward: float | Literal["untrained"] | None = "untrained"
    train_constrained: bool = False
    replays: bool = False
    max_paths: int | None = None


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
        unrewarded: Those of `masked` that only lack a reward.
        elsewhere: Those on paths that have no row, by agent.
        credit: Rewards of turns and calls of all rollouts.
        credited: Those that the trained rows have.
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
    unrewarded: int = 0
    elsewhere: Counter[str] = field(default_factory=Counter)
    credit: int = 0
    credited: int = 0

    def lines(self, where: str) -> Iterator[str]:
        """Yield sentences about the export: what was written to `where`, the tokens left out, and the rollouts."""
        trained = f"{self.trained:,} of {self.sampled:,} sampled tokens are trained"
        yield f"Wrote {count(self.rows, 'row')} of {count(self.rollouts, 'rollout')} to {where}. {trained}."
        tokens = {
            f"of other paths and agents ({by_agent(self.elsewhere)})": self.elsewhere.total(),
            "of rows that ended from outside": self.masked - self.unrewarded,
            "of rows without a reward": self.unrewarded,
            "sampled under a grammar": self.constrained,
        }
        if any(tokens.values()):
            yield f"Tokens left out: {', '.join(f'{number:,} {why}' for why, number in tokens.items() if number)}."
        if self.unrewarded:
            yield (
                f"No reward, so {'these rows are not' if self.trained else 'nothing is'} trained: annotate rollouts "
                "with one, or add --missing-reward NUMBER, or null if the trainer computes rewards."
            )
        if self.credit:
            yield f"Rewards of turns and tool calls: {self.credited:,} of {self.credit:,} are in rows that are trained."
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
        BranchedRolloutError, LogprobMismatchError, ValueError: A rollout cannot be exported, or an option is not one of
            this format. Nothing is written.
    """
    why, takes = _TAKES[to]
    for name, values in takes.items():
        if (value := getattr(options, name)) not in values:
            raise ValueError(f"The format {to} {why}: leave {name}={value!r} out.")
    written = Written()
    exports = _exports(ledgers, to, options, written)
    if to == PARQUET:
        written.rows = write_parquet(path, (sample for each in exports for sample in each.samples))
    else:
        written.rows = _write_lines(_ROWS[to](exports, options), path)
    return written


@dataclass(frozen=True, slots=True)
class _Export:
    """The samples of one rollout, and of each whether its row is trained."""

    ledger: Ledger
    samples: list[TrainingSample]
    trained: list[bool]

    @property
    def rows(self) -> Iterator[tuple[TrainingSample, bool]]:
        """The samples, each with whether it is trained."""
        return zip(self.samples, self.trained, strict=True)


def _exports(ledgers: Iterable[Ledger], to: str, options: ExportOptions, written: Written) -> Iterator[_Export]:
    """Yield the rollouts that have rows, and count all."""
    whole = options.branches == "list"
    for ledger in ledgers:
        written.rollouts += 1
        written.sampled += sum(turn.draft.columns.output for turn in ledger)
        written.credit += len(credits_of(ledger))
        if not len(ledger):
            written.without_turns += 1
        elif options.agent is not None and options.agent not in ledger.agents:
            written.without_agent += 1
            written.elsewhere += left_out(ledger, ())
        else:
            yield _counted(_export(ledger, to, options, whole=whole), options, written, last=not whole)


def _export(ledger: Ledger, to: str, options: ExportOptions, *, whole: bool) -> _Export:
    chosen: Any = {"agent": options.agent, "train_constrained": options.train_constrained}
    branches: Any = options.branches
    if whole:
        samples = samples_of(ledger, max_paths=options.max_paths, **chosen)
    else:
        samples = [sample_of(ledger, branches=branches, **chosen)]
    if isinstance(options.missing_reward, int | float):
        value = float(options.missing_reward)
        samples = [replace(sample, reward=value) if sample.total is None else sample for sample in samples]
    needs_reward = to in ("slime", "verl") and options.missing_reward == "untrained"
    trained = [
        not (needs_reward and sample.total is None) and (to == PARQUET or not sample.ended_outside)
        for sample in samples
    ]
    samples = [replace(sample, reward=0.0) if needs_reward and sample.total is None else sample for sample in samples]
    return _Export(ledger, samples, trained)


def _counted(export: _Export, options: ExportOptions, written: Written, *, last: bool) -> _Export:
    ledger, first = export.ledger, export.samples[0]
    turns = exported_turns(ledger, agent=options.agent, last=last, max_paths=options.max_paths)
    whole, trained = (trained_tokens(each) for each in (export.samples, (one for one, is_in in export.rows if is_in)))
    written.trained += trained
    written.masked += whole - trained
    written.unrewarded += 0 if first.ended_outside else whole - trained
    written.constrained += sum(ledger[turn].draft.columns.output for turn in turns) - whole
    written.without_reward += total_of(ledger) is None
    written.ended_outside += first.ended_outside
    written.elsewhere += left_out(ledger, turns)
    if any(export.trained):
        written.credited += sum(turn in turns for turn, _ in credits_of(ledger))
    return export


def _write_lines(rows: Iterator[Row], path: Path) -> int:
    number = 0
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, allow_nan=False, default=np.ndarray.tolist) + "\n")
            number += 1
    return number


def _slime_rows(exports: Iterable[_Export], options: ExportOptions) -> Iterator[Row]:
    """Yield slime's samples. `group_index` numbers the groups in order of appearance, as slime's data source does."""
    index, groups = 0, dict[str, int]()
    for rollout_id, export in enumerate(exports):
        decode = options.decoder(export.ledger)
        for sample, trained in export.rows:
            refuse_images(sample.images, "a JSON line of slime", sample.identity.rollout_id)
            chosen: Any = {"temperature": options.temperature, "logprobs": options.logprobs}
            fields = slime.fields_of(sample, decode=decode, top_p_replay=options.replays, **chosen)
            fields["remove_sample"] |= not trained
            if fields["remove_sample"] and fields["reward"] is None:
                fields["reward"] = 0.0
            status, metadata = slime.STATUS[sample.termination].lower(), slime.metadata_of(sample)
            group = sample.identity.group_id
            number = None if group is None else groups.setdefault(group, len(groups))
            places = {"index": index, "rollout_id": rollout_id, "group_index": number}
            yield {**places, **fields, "status": status, "metadata": metadata}
            index += 1


def _verl_rows(exports: Iterable[_Export], options: ExportOptions) -> Iterator[Row]:
    for sample, trained in chain.from_iterable(export.rows for export in exports):
        refuse_images(sample.images, "a JSON line of verl", sample.identity.rollout_id)
        parts = prompt_response_of(sample, trainer="verl", temperature=options.temperature, logprobs=options.logprobs)
        parts = parts if trained else parts.masked()
        yield verl.fields_of(parts, sample)


def _trl_rows(exports: Iterable[_Export], options: ExportOptions) -> Iterator[Row]:
    chosen: Any = {"temperature": options.temperature, "end_id": 0, "logprobs": options.logprobs}
    for export in exports:
        yield from (trl.row_of(export.ledger, sample, **chosen) for sample in export.samples)


_ROWS: Mapping[str, Callable[[Iterable[_Export], ExportOptions], Iterator[Row]]] = MappingProxyType(
    {"slime": _slime_rows, "verl": _verl_rows, "trl": _trl_rows}
)
FORMATS = (PARQUET, *_ROWS)
"""The formats that `tito export --to` takes."""
