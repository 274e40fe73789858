"""Tables and summary lines about rollouts, for a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strands_tito.engines.errors import EngineError
from strands_tito.inspect.verify import Rescored, merge, rescore
from tito_core.backend.errors import BackendError, UnknownBackendError
from tito_core.backend.typed_values import InvalidValueError
from tito_core.chat.template import TemplateError
from tito_core.chat.tokenizer import TokenizerError
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.forest_invariants import check_ledger
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.provenance import Provenance
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

ANSWER_WIDTH = 34
"""Width of the table's answer column, in characters."""


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


def rollout_table(rollouts: Sequence[Rollout]) -> Table:
    """Return a table with one row per rollout."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("#", justify="right", min_width=2)
    table.add_column("question", no_wrap=True, min_width=20, max_width=36)
    for name in ("turns", "prompt", "inserted", "sampled", "calls", "malformed"):
        table.add_column(name, justify="right", min_width=len(name))
    table.add_column("answer", no_wrap=True, overflow="ellipsis", max_width=ANSWER_WIDTH)
    for number, rollout in enumerate(rollouts, 1):
        count = Counts.of(rollout.ledger)
        numbers = (count.turns, count.prompt, count.inserted, count.sampled, count.good_calls, count.malformed_calls)
        answer = " ".join(rollout.answer.split()) or (rollout.stop_reason and f"({rollout.stop_reason})")
        table.add_row(str(number), Text(rollout.question), *map(str, numbers), Text(answer))
    return table


def ledger_table(ledgers: Iterable[Ledger]) -> Table:
    """Return a table with one row per ledger; columns without any value (task, reward, termination) are left out."""
    rows = [_ledger_row(ledger) for ledger in ledgers]
    shown = [name for name in _LEDGER_COLUMNS if name not in _OPTIONAL_COLUMNS or any(row[name] for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("#", justify="right", min_width=2)
    for name in shown:
        table.add_column(
            name, justify="left" if name in _TEXT_COLUMNS else "right", no_wrap=True, min_width=len(name), max_width=36
        )
    for number, row in enumerate(rows, 1):
        table.add_row(str(number), *(Text(row[name]) for name in shown))
    return table


_TEXT_COLUMNS = ("ledger", "task", "ended")
_OPTIONAL_COLUMNS = ("task", "reward", "ended")
_LEDGER_COLUMNS = (
    "ledger",
    "task",
    "turns",
    "leaves",
    "prompt",
    "inserted",
    "sampled",
    "calls",
    "malformed",
    "reward",
    "ended",
)


def _ledger_row(ledger: Ledger) -> dict[str, str]:
    count = Counts.of(ledger)
    values = (
        ledger.uuid[:8],
        ledger.header.task_id or "",
        count.turns,
        len(ledger.leaves()),
        count.prompt,
        count.inserted,
        count.sampled,
        count.good_calls,
        count.malformed_calls,
        ledger.annotation("reward", default=""),
        ledger.annotation("termination", default=""),
    )
    return dict(zip(_LEDGER_COLUMNS, map(str, values), strict=True))


def laws_line(ledgers: int, turns: int) -> str:
    """Return the line about the laws that were checked."""
    return f"laws        1 to 4 and 8 to 10 hold on {ledgers} ledgers, {turns} turns"


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
