"""Tokens in a terminal, coloured by provenance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from math import exp

from rich.console import Group, RenderableType
from rich.text import Text

from strands_tito.inspect.columns import Column, FittedTable
from strands_tito.terminal import VISIBLE
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.provenance import Provenance
from tito_core.ledger.trajectory import Trajectory

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
