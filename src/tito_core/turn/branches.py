"""Why a history does not simply go on after the latest turn: what changed, told from its content (law 8).

Three questions, in this order. Is the place taken? A turn that is the first after its parent, or the first of all, is
no branch. Who asks? A call without an agent is a side call, and an agent that brings no key of its own, or whose own
last turn somebody else went on from, is separate. What did the agent do? Its history is compared with the one that its
own last turn ended, and where they part tells the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from strands.types.content import Messages

from tito_core.ledger.branch import OF_ONE_AGENT, Branch, Reason
from tito_core.ledger.history_index import Match, Node
from tito_core.ledger.ledger import Ledger

_BLANK = [{"text": "[blank text]"}]
"""What Strands shows of an answer without content (strands/event_loop/streaming.py)."""
_SHOWN = 60
"""Characters of a message that an error shows."""


class HistoryChangedError(ValueError):
    """An agent's history changed, and `history="error"` asked to be told instead of branching (law 8)."""


@dataclass(frozen=True, slots=True, eq=False)
class HistoryContext:
    """What a call brings.

    Attributes:
        ledger: The ledger.
        walk: How far it knows the history.
        opening: What comes before all messages.
        messages: The history.
        own: The agent's own last turn, as its key names it, or None.
        is_agents: Whether an agent calls; a call outside any agent has no channel for a key.
    """

    ledger: Ledger
    walk: Match
    opening: dict[str, Any]
    messages: Messages
    own: int | None
    is_agents: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """How an agent's history differs from what it was: equal up to item `at` (item 0 is the opening).

    Attributes:
        entries: The history that the agent's own last turn ended, its answer last.
        before: The messages of `entries`.
        now: The history that comes.
        at: First item that differs, or the length of the shorter one.
    """

    entries: Sequence[Node]
    before: Sequence[Any]
    now: Sequence[Any]
    at: int


def branch_of(situation: HistoryContext, parent: int | None) -> Branch | None:
    """Return why the coming turn branches, or None when it is the first or simply goes on.

    Args:
        situation: What the call brings.
        parent: The turn that it extends, or None for a new root.
    """
    ledger = situation.ledger
    is_taken = len(ledger) > 0 if parent is None else ledger.extended(parent)
    if not is_taken:
        return None
    if situation.own is None:
        return _outsider(situation, parent)
    if situation.own == parent:  # this agent did not move: another one went on from its turn
        return Branch(Reason.SEPARATE, parent)
    return _departure(situation, situation.own, parent)


def rewritten_branch(situation: HistoryContext, parent: int, written: Branch, *, may_branch: bool) -> Branch:
    """Return why a history begins anew whose reasoning the template writes in another way: mostly for that alone.

    Args:
        situation: What the call brings.
        parent: The turn that it fits, and would extend if the reasoning stayed.
        written: The branch that the template makes.
        may_branch: Whether the agent's own history may have changed.

    Raises:
        HistoryChangedError: It did and may not; what the template changes is no change of the agent's.
    """
    ledger, own = situation.ledger, situation.own
    if own is not None and own != parent:
        branch = _departure(situation, own, None)
        if not may_branch:
            refuse(situation, branch)
        return branch
    if not ledger.extended(parent) and all(turn.draft.branch != written for turn in ledger):
        return written
    return Branch(Reason.SEPARATE, parent) if own == parent else _outsider(situation, parent)


def lineage(ledger: Ledger, turn: int | None) -> Iterator[int]:
    """Yield a turn and those it came from, nearest first: its path, and past each root the turn that this one left."""
    while turn is not None:
        yield turn
        draft = ledger[turn].draft
        turn = draft.parent if draft.parent is not None or draft.branch is None else draft.branch.turn


def _outsider(situation: HistoryContext, parent: int | None) -> Branch:
    """Link a call of nobody known: to the turn that it forks, or to the last one that its history begins with."""
    reason = Reason.SEPARATE if situation.is_agents else Reason.SIDE_CALL
    if parent is not None:
        return Branch(reason, parent)
    for entry in situation.walk.node.upward():
        if entry.turns:
            return Branch(reason, max(entry.turns), situation.walk.known - 1)
    return Branch(reason)


def _departure(situation: HistoryContext, own: int, parent: int | None) -> Branch:
    """Return where and why an agent's history left that of its own last turn."""
    change = _change(situation)
    if change is None:  # a loaded ledger knows the digest only
        reason = Reason.EDIT if parent is None else _asked(situation, parent)
        return Branch(reason, own if parent is None else parent)
    if change.at == 0:
        detail = _changed_parts(change.before[0], situation.opening)
        return Branch(Reason.OPENING, own if parent is None else parent, detail=detail)
    message = change.at - 1
    if parent is not None:
        return Branch(_asked(situation, parent), parent, message)
    return Branch(_reason(situation, change), _left(situation.ledger, own, change), message)


def _change(situation: HistoryContext) -> _Change | None:
    """Compare an agent's history with the one that its own last turn ended; None where that one is not known."""
    last = None if situation.own is None else situation.ledger.node_of(situation.own)
    if last is None:
        return None
    entries = list(last.upward())[::-1]
    before, now = [entry.message for entry in entries], [situation.opening, *situation.messages]
    differ = (i for i, (old, new) in enumerate(zip(before, now, strict=False)) if old != new)
    return _Change(entries, before, now, next(differ, min(len(before), len(now))))


def _left(ledger: Ledger, own: int, change: _Change) -> int:
    """Return the last turn that ends in what did not change, else the agent's last; of several its own."""
    ancestors = set(lineage(ledger, own))
    for entry in reversed(change.entries[: change.at]):
        if entry.turns:
            return max(ancestors.intersection(entry.turns) or entry.turns)
    return own


def _reason(situation: HistoryContext, change: _Change) -> Reason:
    """Name a change after which no turn of the ledger can be extended."""
    before, now, at = change.before, change.now, change.at
    asked = _asked(situation, None)
    if asked == Reason.RETRY:
        return asked
    if _resumed(before, now[at:], at + 1) is not None:
        return Reason.TRIM
    if all(message["role"] != "assistant" for message in now[at:]):
        return asked
    if at < len(before) and _without_reasoning(before[at]) == now[at]:
        return Reason.THINKING
    kept_from = _resumed(before, now[at + 1 :], at + 1)
    return Reason.SUMMARY if kept_from is not None and kept_from > at + 1 else Reason.EDIT


def _asked(situation: HistoryContext, parent: int | None) -> Reason:
    """Distinguish a retry, the same messages asked again after the same turn, from a rewind."""
    walk, ledger = situation.walk, situation.ledger
    answers = () if walk.new else (turn for answer in walk.node.children for turn in answer.turns)
    return Reason.RETRY if any(ledger[turn].parent == parent for turn in answers) else Reason.REWIND


def _resumed(before: Sequence[Any], now: Sequence[Any], start: int) -> int | None:
    """Find the first item of `before`, from `start` on, from which `now` takes up all that follows.

    The last item is an answer that a hook may have lost: it counts only where nothing else is left.
    """
    for first in range(start, len(before)):
        kept = before[first:-1] or before[first:]
        if kept == now[: len(kept)]:
            return first
    return None


def _without_reasoning(message: Any) -> Any:
    """Return a known assistant's message without its reasoning, or None for one that has none."""
    if message.get("role") != "assistant":
        return None
    kept = [block for block in message["content"] if "reasoningContent" not in block]
    return {**message, "content": kept or _BLANK} if len(kept) < len(message["content"]) else None


def _changed_parts(old: Any, new: dict[str, Any]) -> str:
    names = {"system": "system prompt", "tools": "tools", "template": "template"}
    return " and ".join(name for key, name in names.items() if old[key] != new[key])


def refuse(situation: HistoryContext, branch: Branch | None) -> None:
    """Raise for a branch that lies in one agent's own history, with the message that changed.

    Raises:
        HistoryChangedError: Always, but for branches of separate agents and side calls.
    """
    if branch is None or branch.reason not in OF_ONE_AGENT:
        return
    raise HistoryChangedError(
        f"Law 8: history='error', and {_what_changed(situation, branch)} ({branch}). Make the change in a new rollout "
        "(model.reset()), or let it branch with history='fork'."
    )


def _what_changed(situation: HistoryContext, branch: Branch) -> str:
    change = _change(situation)
    if branch.message is None or change is None:
        return f"the {branch.detail or 'history'} changed"
    old, new = change.before[change.at :], change.now[change.at :]
    if not new:
        what = "is asked for again" if branch.reason == Reason.RETRY else "is gone"
        return f"{_named(branch.message, old[0])} {what}: {_excerpt(old[0])}"
    if not old:
        at, stranger = next((i, message) for i, message in enumerate(new) if message["role"] == "assistant")
        return f"{_named(branch.message + at, stranger)} was not sampled here: {_excerpt(stranger)}"
    return f"{_named(branch.message, new[0])} changed: {_excerpt(old[0])} became {_excerpt(new[0])}"


def _named(index: int, message: Any) -> str:
    return f"message {index} ({message['role']})"


def _excerpt(message: Any) -> str:
    words = " ".join(_strings(message["content"]))
    return repr(words if len(words) <= _SHOWN else words[:_SHOWN] + "...")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _strings(item)]
