"""A ledger drawn as a text tree, one line per turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tito_core.ledger.turn import Turn

if TYPE_CHECKING:
    from tito_core.ledger.ledger import Ledger


def draw(ledger: Ledger) -> str:
    """Draw each turn under its parent: its agent if there are several, tokens, finish reason, calls and branch."""
    turns = list(ledger)
    sampled = sum(turn.draft.columns.output for turn in turns)
    total = sum(turn.own_length for turn in turns)
    title = (
        f"ledger {ledger.uuid}: {count(len(turns), 'turn')}, "
        f"{count(len(ledger.leaves()), 'trajectory', 'trajectories')}, {total} tokens, {sampled} of them sampled"
    )
    return "\n".join([title, *_lines(turns, names_agents=len({turn.draft.agent for turn in turns}) > 1)])


def _lines(turns: list[Turn], *, names_agents: bool) -> Iterator[str]:
    """Yield one line per turn, depth first. Siblings are indented; an only child stays below its parent."""
    children_of: dict[int | None, list[Turn]] = {}
    for turn in turns:
        children_of.setdefault(turn.parent, []).append(turn)
    stack = _siblings(children_of.get(None, []), "")
    while stack:
        turn, lead, indent = stack.pop()
        yield f"{lead}{_words(turn, names_agents=names_agents)}"
        children = children_of.get(turn.index, [])
        stack += _siblings(children, indent) if len(children) > 1 else [(child, indent, indent) for child in children]


def _siblings(turns: list[Turn], indent: str) -> list[tuple[Turn, str, str]]:
    """Return sibling turns, last first, each with the prefix of its own line and that of its descendants."""
    return [
        (turn, indent + ("└─ " if turn is turns[-1] else "├─ "), indent + ("   " if turn is turns[-1] else "│  "))
        for turn in reversed(turns)
    ]


def _words(turn: Turn, *, names_agents: bool) -> str:
    draft = turn.draft
    by = f" by {_one_line(draft.agent or 'no agent')}" if names_agents else ""
    parts = [f"turn {turn.index}{by}", f"{draft.columns.prompt}+{draft.columns.output} tokens", str(draft.finish)]
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
    """Escape a name that would break the line: a malformed call has any text for a name."""
    return name if name.isprintable() else repr(name)


def _unless_ok(status: str) -> str:
    return "" if status == "ok" else f" ({status})"


def count(number: int, one: str, several: str = "") -> str:
    """Return a number with its noun."""
    return f"{number} {one if number == 1 else several or one + 's'}"
