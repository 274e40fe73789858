"""Rollouts in a terminal: tables, summary lines, and tokens coloured by provenance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import exp
from typing import TYPE_CHECKING, Literal

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from strands_tito.inspect.mismatch import Mismatch
from strands_tito.inspect.verify import Rescored, merge, rescore
from tito_core.ledger.laws import check_ledger
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.provenance import Provenance
from tito_core.ledger.trajectory import Trajectory, count
from tito_core.ledger.turn import REWARD
from tito_core.model import Policy
from tito_core.parsing.completion import CallStatus
from tito_engines.terminal import VISIBLE, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished rollout: the question, the answer, why it stopped, and its ledger."""

    question: str
    answer: str
    stop_reason: str
    ledger: Ledger


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
    """Return a table with one row per ledger. Columns without any value (`_OPTIONAL`) are left out."""
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
        Column("credit", [row.credit for row in rows], rank=1),
        Column("ended", [row.ended for row in rows], rank=1, is_text=True),
    ]
    return FittedTable([column for column in columns if column.name not in _OPTIONAL or any(column.cells)])


_OPTIONAL = ("task", "agents", "reward", "credit", "ended")


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
    """What the table shows of a ledger besides its counts, as text.

    `logprob` is the mean of its sampled tokens, and `credit` the sum of the rewards of its turns and calls.
    """

    ledger: str
    task: str
    agents: str
    leaves: str
    logprob: str
    reward: str
    credit: str
    ended: str

    @classmethod
    def of(cls, ledger: Ledger) -> _LedgerRow:
        sampled = [turn.draft.logprobs for turn in ledger if len(turn.draft.logprobs)]
        rewards = {(note.turn, note.call): note.value for note in ledger.annotations if note.name == REWARD}
        credit = [value for (turn, _), value in rewards.items() if turn is not None and isinstance(value, int | float)]
        return cls(
            ledger=ledger.uuid[:8],
            task=ledger.header.task_id or "",
            agents=", ".join(agents) if len(agents := ledger.agents) > 1 else "",
            leaves=str(len(ledger.leaves())),
            logprob=f"{np.concatenate(sampled).mean():.2f}" if sampled else "",
            reward=str(rewards.get((None, None), "")),
            credit=f"{sum(credit):g}" if credit else "",
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
        "their order (see docs/settings.md)"
    )


def rescored_line(rescored: Rescored) -> str:
    """Return the line about how far the engine's scores are from the recorded logprobs."""
    if not len(rescored.differences):
        return f"re-scored   nothing was compared, because {_why_nothing(rescored.not_comparable)}"
    return (
        f"re-scored   {len(rescored.differences)} sampled tokens, |recorded - re-scored| "
        f"p50 {rescored.quantile(0.5):.1e}, p99 {rescored.quantile(0.99):.1e}, max {rescored.quantile(1):.1e} nats, "
        f"{rescored.not_comparable} not comparable"
    )


def _why_nothing(sampled: int) -> str:
    if not sampled:
        return "the rollouts hold no sampled tokens"
    return (
        f"none of {count(sampled, 'sampled token')} is comparable: scores are raw, but these logprobs include, or may "
        "include, a temperature, a penalty, a truncation or a grammar, or the server cannot score their path"
    )


def mismatch_lines(rescored: Rescored) -> Iterator[str]:
    """Yield how far the server's policy is from the recorded one: in whole, and where it is furthest."""
    found = rescored.mismatch()
    if found.whole is None:
        return
    yield f"mismatch    {_mismatch(found.whole)}"
    for what, parts in (("turn", found.by_turn), ("position", found.by_position)):
        number, worst = max(parts.items(), key=lambda each: each[1].kl)
        yield f"            furthest from {what} {number}: {_mismatch(worst)}"


def _mismatch(each: Mismatch) -> str:
    return (
        f"{count(each.tokens, 'token')}, KL {each.kl:.1e} (k3), reverse {each.reverse_kl:.1e} nats a token, effective "
        f"sample size {each.effective:.1%}, {each.far:.1%} of ratios outside 0.5 to 2"
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


STYLES = {
    Provenance.PROMPT: "cyan",
    Provenance.SCAFFOLD: "bright_black",
    Provenance.INSERTED: "black on yellow",
    Provenance.SAMPLED: "green",
    Provenance.CONSTRAINED: "magenta",
}
"""Every second token of a run is underlined, so that token borders are visible."""
_VISIBLE = VISIBLE | {ord("\n"): "⏎\n"}
"""Control characters and what is printed for them."""
Show = Callable[[int], str]
"""Returns the text to print for a token id."""


def ids_only(token: int) -> str:
    """Return a token's id as text, for rollouts without a tokenizer."""
    return f"{token} "


def coloured(ledger: Ledger, show: Show) -> RenderableType:
    """Return a legend and every trajectory of a ledger, turn by turn."""
    parts: list[RenderableType] = [_legend(), Text(ledger.tree())]
    trajectories = ledger.trajectories
    for number, trajectory in enumerate(trajectories, 1):
        parts.append(Text(f"\ntrajectory {number} of {len(trajectories)}", style="bold"))
        parts += _trajectory(trajectory, show)
    return Group(*parts)


def logprob_table(ledger: Ledger, show: Show) -> FittedTable:
    """Return a row for each sampled token, with its offset in the first trajectory that holds it.

    With `ids_only` there is no column of texts.
    """
    rows = [
        (f"{number}", f"{turn}", f"{at}", f"{token}", f"{logprob:.4f}", f"{exp(logprob):.3f}", _one_line(show(token)))
        for number, trajectory in enumerate(ledger.iter_trajectories(), 1)
        for turn, at, token, logprob in _sampled(trajectory)
    ]
    ranks = {"trajectory": 3, "turn": 2, "offset": 0, "id": 0, "logprob": 0, "probability": 1}
    cells = list(zip(*rows, strict=True)) or [()] * (len(ranks) + 1)
    columns = [Column(name, column, rank) for (name, rank), column in zip(ranks.items(), cells[:-1], strict=False)]
    text = [] if show is ids_only else [Column("text", cells[-1], is_text=True)]
    return FittedTable([*columns, *text])


def _sampled(trajectory: Trajectory) -> Iterator[tuple[int, int, int, float]]:
    """Yield turn, offset, id and logprob of each token that the engine sampled in no earlier trajectory."""
    for turn, start, stop, is_output in trajectory.segments:
        if is_output and turn not in trajectory.context_turns:
            for at in range(start, stop):
                yield turn, at, int(trajectory.token_ids[at]), float(trajectory.logprobs[at])


def _one_line(text: str) -> str:
    return text.translate(_VISIBLE).replace("\n", "")


def _legend() -> Text:
    labels = (Text(f" {kind.name.lower()} ", style=style) for kind, style in STYLES.items())
    return Text(" ").join(labels)


def _trajectory(trajectory: Trajectory, show: Show) -> Iterator[RenderableType]:
    at = 0
    for turn in trajectory.path:
        stop = turn.path_length
        context = ", context here: an earlier trajectory trains it" if turn.index in trajectory.context_turns else ""
        branch = f"  ← {turn.draft.branch}" if turn.draft.branch is not None else ""
        yield Text(f"turn {turn.index}, tokens {at} to {stop}{context}{branch}", style="bold dim")
        yield _tokens(trajectory, at, stop, show)
        at = stop


def _tokens(trajectory: Trajectory, start: int, stop: int, show: Show) -> Text:
    text = Text()
    ids = trajectory.token_ids[start:stop].tolist()
    kinds = trajectory.provenance[start:stop].tolist()
    at = 0
    for kind, run in groupby(kinds):
        for number in range(len(list(run))):
            style = STYLES[Provenance(kind)] + (" underline" if number % 2 else "")
            text.append(show(ids[at]).translate(_VISIBLE), style)
            at += 1
    return text


MIN_TEXT, MAX_TEXT = 12, 36
"""Widths of a text column, in characters."""
_BETWEEN = 3
"""Characters between two columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        cells: One text for each row.
        rank: Columns with a higher rank are left out first; those of rank 0 never.
        is_text: Whether its cells are words, which may be shortened, and not numbers.
    """

    name: str
    cells: Sequence[str]
    rank: int = 0
    is_text: bool = False

    @property
    def min_width(self) -> int:
        """Least width: numbers are whole, words may be shortened to `MIN_TEXT` characters."""
        widest = max((Text(visible(cell)).cell_len for cell in self.cells), default=0)
        return max(len(self.name), min(widest, MIN_TEXT) if self.is_text else widest)


class FittedTable:
    """A table whose columns are chosen when the width is known. It names the columns that it left out."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown = list(self.columns)
        while (optional := [column for column in shown if column.rank]) and _min_width(shown) > options.max_width:
            shown.remove(max(optional, key=lambda column: column.rank))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in shown:  # rich shortens the columns that may wrap; their cells do not wrap
            longest = max(MAX_TEXT, len(column.name)) if column.is_text else None
            justify: Literal["left", "right"] = "left" if column.is_text else "right"
            heading = Text(column.name, no_wrap=True)
            table.add_column(heading, justify=justify, no_wrap=not column.is_text, max_width=longest)
        for row in zip(*(column.cells for column in shown), strict=True):
            table.add_row(*(Text(visible(cell), no_wrap=True, overflow="ellipsis") for cell in row))
        yield table
        if left_out := [column.name for column in self.columns if column not in shown]:
            yield Text(f"Left out at this width: {', '.join(left_out)}.", style="dim")


def _min_width(columns: Sequence[Column]) -> int:
    return sum(column.min_width for column in columns) + _BETWEEN * (len(columns) - 1)
