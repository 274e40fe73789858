"""A forest drawn with lines, a turn a line, for a person's eyes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tito_core.ledger.turn import Turn

if TYPE_CHECKING:
    from tito_core.ledger.ledger import Ledger


def draw(ledger: Ledger) -> str:
    """Draw each turn under the one it extends: its tokens, how it ended, what it called, and why it branched."""
    turns = list(ledger)
    sampled = sum(turn.draft.columns.output for turn in turns)
    total = sum(turn.own_length for turn in turns)
    title = (
        f"ledger {ledger.uuid}: {_many(len(turns), 'turn')}, "
        f"{_many(len(ledger.leaves()), 'trajectory', 'trajectories')}, {total} tokens, {sampled} of them sampled"
    )
    return "\n".join([title, *_lines(turns)])


def _lines(turns: list[Turn]) -> Iterator[str]:
    """Yield a line a turn, depth first: a fork is indented, and a turn that only goes on stays below the one before."""
    below: dict[int | None, list[Turn]] = {}
    for turn in turns:
        below.setdefault(turn.parent, []).append(turn)
    waiting = _forked(below.get(None, []), "")
    while waiting:
        turn, lead, indent = waiting.pop()
        yield f"{lead}{_words(turn)}"
        after = below.get(turn.index, [])
        waiting += _forked(after, indent) if len(after) > 1 else [(next_, indent, indent) for next_ in after]


def _forked(turns: list[Turn], indent: str) -> list[tuple[Turn, str, str]]:
    """Return turns beside each other, last first, with what leads their own line and what leads those below."""
    return [
        (turn, indent + ("└─ " if turn is turns[-1] else "├─ "), indent + ("   " if turn is turns[-1] else "│  "))
        for turn in reversed(turns)
    ]


def _words(turn: Turn) -> str:
    draft = turn.draft
    parts = [f"turn {turn.index}", f"{draft.columns.prompt}+{draft.columns.output} tokens", str(draft.finish)]
    if draft.calls:
        parts.append(
            "calls " + ", ".join(f"{_one_line(call.name or '?')}{_unless_ok(call.status)}" for call in draft.calls)
        )
    if not draft.reasoning_closed:
        parts.append("reasoning left open")
    if draft.constrained:
        parts.append("constrained")
    if draft.branch is not None:
        parts.append(f"← {draft.branch}")
    return "  ".join(parts)


def _one_line(name: str) -> str:
    """Write out what would break the line: a malformed call is named as the policy's tokens say."""
    return name if name.isprintable() else repr(name)


def _unless_ok(status: str) -> str:
    return "" if status == "ok" else f" ({status})"


def _many(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"
