"""Tables and summary lines about rollouts, for a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from strands_tito.engines.errors import EngineError
from strands_tito.inspect.columns import Column, FittedTable
from strands_tito.inspect.verify import Rescored, merge, rescore
from tito_core.backend.errors import BackendError, UnknownBackendError
from tito_core.backend.typed_values import InvalidValueError
from tito_core.chat.template import TemplateError
from tito_core.chat.tokenizer import TokenizerError
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.forest_invariants import check_ledger
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.provenance import Provenance
from tito_core.ledger.tree import count
from tito_core.model import Policy
from tito_core.parsing.parsed import CallStatus
from tito_core.parsing.registry import UnknownParserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


EXPECTED_ERRORS = (
    BackendError,
    EngineError,
    InvalidValueError,
    LawViolationError,
    TemplateError,
    TokenizerError,
    UnknownBackendError,
    UnknownParserError,
)
"""Errors that the command line prints without a traceback."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished rollout: the question, the answer, why it stopped, and its ledger."""

    question: str
    answer: str
    stop_reason: str
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals of one ledger; each token and each call is counted once."""

    turns: int
    prompt: int
    inserted: int
    sampled: int
    good_calls: int
    malformed_calls: int

    @classmethod
    def of(cls, ledger: Ledger) -> Counts:
        """Count a ledger."""
        statuses = [call.status for turn in ledger for call in turn.draft.calls]
        delta = sum(len(turn.draft.prompt_ids) for turn in ledger)
        inserted = sum(int((turn.draft.prompt_provenance == Provenance.INSERTED).sum()) for turn in ledger)
        good = statuses.count(CallStatus.OK) + statuses.count(CallStatus.LENIENT)
        return cls(
            turns=len(ledger),
            prompt=delta - inserted,
            inserted=inserted,
            sampled=sum(len(turn.draft.output_ids) for turn in ledger),
            good_calls=good,
            malformed_calls=len(statuses) - good - statuses.count(CallStatus.SUSPECT),
        )


def rollout_table(rollouts: Sequence[Rollout]) -> FittedTable:
    """Return a table with one row per rollout."""
    counts = [Counts.of(rollout.ledger) for rollout in rollouts]
    return FittedTable(
        [
            Column("#", [str(number) for number in range(1, len(counts) + 1)]),
            Column("question", [rollout.question for rollout in rollouts], is_text=True),
            *_count_columns(counts),
            Column("answer", [_answer(rollout) for rollout in rollouts], is_text=True),
        ]
    )


def _answer(rollout: Rollout) -> str:
    return " ".join(rollout.answer.split()) or (rollout.stop_reason and f"({rollout.stop_reason})")


def ledger_table(ledgers: Iterable[Ledger]) -> FittedTable:
    """Return a table with one row per ledger. Columns without any value (task, agents, reward, ended) are left out."""
    rows, counts = [], []
    for ledger in ledgers:  # one at a time: a file may hold thousands
        rows.append(_LedgerRow.of(ledger))
        counts.append(Counts.of(ledger))
    columns = [
        Column("#", [str(number) for number in range(1, len(rows) + 1)]),
        Column("ledger", [row.ledger for row in rows], is_text=True),
        Column("task", [row.task for row in rows], rank=1, is_text=True),
        Column("agents", [row.agents for row in rows], rank=1, is_text=True),
        *_count_columns(counts),
        Column("leaves", [row.leaves for row in rows], rank=4),
        Column("logprob", [row.logprob for row in rows], rank=2),
        Column("reward", [row.reward for row in rows], rank=1),
        Column("ended", [row.ended for row in rows], rank=1, is_text=True),
    ]
    return FittedTable([column for column in columns if column.name not in _OPTIONAL or any(column.cells)])


_OPTIONAL = ("task", "agents", "reward", "ended")


def _count_columns(counts: Sequence[Counts]) -> list[Column]:
    return [
        Column("turns", [str(count.turns) for count in counts]),
        Column("prompt", [str(count.prompt) for count in counts], rank=3),
        Column("inserted", [str(count.inserted) for count in counts], rank=5),
        Column("sampled", [str(count.sampled) for count in counts]),
        Column("calls", [str(count.good_calls) for count in counts], rank=1),
        Column("malformed", [str(count.malformed_calls) for count in counts], rank=1),
    ]


@dataclass(frozen=True, slots=True)
class _LedgerRow:
    """What the table shows of a ledger besides its counts, as text. `logprob` is the mean of its sampled tokens."""

    ledger: str
    task: str
    agents: str
    leaves: str
    logprob: str
    reward: str
    ended: str

    @classmethod
    def of(cls, ledger: Ledger) -> _LedgerRow:
        sampled = [turn.draft.logprobs for turn in ledger if len(turn.draft.logprobs)]
        return cls(
            ledger=ledger.uuid[:8],
            task=ledger.header.task_id or "",
            agents=", ".join(agents) if len(agents := ledger.agents) > 1 else "",
            leaves=str(len(ledger.leaves())),
            logprob=f"{np.concatenate(sampled).mean():.2f}" if sampled else "",
            reward=str(ledger.annotation("reward", default="")),
            ended=str(ledger.annotation("termination", default="")),
        )


def laws_line(ledgers: int, turns: int) -> str:
    """Return the line about the laws that were checked."""
    return f"laws        1 to 4 and 8 to 10 hold on {count(ledgers, 'ledger')}, {count(turns, 'turn')}"


def unordered_line(ledgers: Iterable[Ledger]) -> str:
    """Return the line about streamed turns whose events did not show their order; empty if there are none."""
    turns = [turn for ledger in ledgers for turn in ledger if turn.draft.engine.unordered]
    if not turns:
        return ""
    sampled = sum(len(turn.draft.output_ids) for turn in turns)
    return (
        f"streamed    {count(len(turns), 'turn')}, {count(sampled, 'sampled token')}: nothing in the events showed "
        "their order (see docs/streaming.md)"
    )


async def show(console: Console, policy: Policy, rollouts: Sequence[Rollout], seconds: float) -> Rescored:
    """Print the table of rollouts, check every ledger, re-score it and print the totals.

    Raises:
        LawViolationError: A ledger breaks a law.
    """
    console.print(rollout_table(rollouts))
    ledgers = [rollout.ledger for rollout in rollouts]
    for ledger in ledgers:
        check_ledger(ledger)
    rescored = merge(await asyncio.gather(*(rescore(ledger, policy.backend) for ledger in ledgers)))
    turns = sum(len(ledger) for ledger in ledgers)
    drifted = sum(len(drifted_turns(ledger, policy.tokenizer)) for ledger in ledgers)
    sampled = sum(Counts.of(ledger).sampled for ledger in ledgers)
    info = policy.info
    console.print(
        f"engine      {info.backend} {info.version}, model {info.model}, logprobs {_processing(policy)}", markup=False
    )
    console.print(laws_line(len(ledgers), turns))
    console.print(rescored_line(rescored))
    share = drifted / turns if turns else 0.0
    console.print(f"drift       {drifted} of {turns} turns ({share:.0%}) would change if their text were re-tokenized")
    console.print(
        f"speed       {sampled / seconds:.0f} sampled tokens/s, {turns / seconds:.2f} turns/s, {seconds:.1f} s"
    )
    return rescored


def rescored_line(rescored: Rescored) -> str:
    """Return the line about how far the engine's scores are from the recorded logprobs."""
    return (
        f"re-scored   {len(rescored.differences)} sampled tokens, |recorded - re-scored| "
        f"p50 {rescored.quantile(0.5):.1e}, p99 {rescored.quantile(0.99):.1e}, max {rescored.quantile(1):.1e} nats, "
        f"{rescored.not_comparable} not comparable"
    )


def _processing(policy: Policy) -> str:
    labels = {True: "include the temperature", False: "raw", None: "of unknown processing"}
    return f"{labels[policy.info.processed_logprobs]} (measured)"


def drifted_turns(ledger: Ledger, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the turns whose sampled ids change when they are decoded and encoded again."""
    return [
        turn.index
        for turn in ledger
        if _round_trip(tokenizer, turn.draft.output_ids.tolist()) != turn.draft.output_ids.tolist()
    ]


def _round_trip(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    text = str(tokenizer.decode(ids, skip_special_tokens=False))
    return list(tokenizer.encode(text, add_special_tokens=False))
