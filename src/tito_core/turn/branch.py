"""Say why a turn branches (law 8): what its agent did to the history. Most turns do not, and never come here.

Three questions, in this order:

1. Is the position new? A turn that is the first after its parent, or the first of all, is not a branch.
2. Who calls? A call outside any agent is a side call. An agent is separate if its key names no turn of this ledger, or
   if the turn that its key names was continued: by another agent, or by itself where its key went back too, as by
   Strands' `load_snapshot` or an older session. The key is all that tells them apart.
3. What did the agent do? The history that ended with the agent's own last turn is compared with its history now. The
   first difference gives the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from strands.types.content import Messages

from tito_core.ledger.errors import TITOError
from tito_core.ledger.history import Match, Node
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Branch, Reason

_BLANK = [{"text": "[blank text]"}]
"""What Strands shows for an answer without content (strands/event_loop/streaming.py)."""
_EXCERPT_CHARACTERS = 60
"""Maximum characters of a message in an error."""


class HistoryChangedError(TITOError, ValueError):
    """An agent's history changed, and `history="error"` forbids branches (law 8)."""


class HistoryContext(msgspec.Struct, frozen=True, eq=False):
    """The history of a call and its caller.

    Attributes:
        ledger: The ledger.
        history: How much of the history the ledger knows.
        opening: What comes before all messages.
        messages: The history.
        last_turn: The agent's own last turn, as its key names it, or None.
        is_agents: Whether an agent calls; a call outside any agent has no channel for a key.
    """

    ledger: Ledger
    history: Match
    opening: dict[str, Any]
    messages: Messages
    last_turn: int | None
    is_agents: bool


def branch_of(context: HistoryContext, parent: int | None, *, may_branch: bool) -> Branch:
    """Return why the next turn branches, where it is neither the first one nor the first after its parent.

    Args:
        context: The history and its caller.
        parent: The turn that it extends, or None for a new root.
        may_branch: Whether the agent may change its own history.

    Raises:
        HistoryChangedError: The agent changed its history and may not.
    """
    if context.last_turn is None:
        return _outsider(context, parent)
    if context.last_turn == parent:  # by its key it did not change its history: another one continued from its turn
        return Branch(Reason.SEPARATE, parent)
    return _allowed(context, _departure(context, context.last_turn, parent), may_branch)


def rewritten_branch(context: HistoryContext, parent: int, written: Branch, *, may_branch: bool) -> Branch:
    """Return why a history starts a new root when the template renders its reasoning differently.

    The reason is `written`, unless the agent changed its history too.

    Args:
        context: The history and its caller.
        parent: The turn that it fits, and would extend if the reasoning stayed.
        written: The branch that the template makes.
        may_branch: Whether the agent may change its own history.

    Raises:
        HistoryChangedError: The agent changed its history and may not. A change by the template does not count.
    """
    ledger, last_turn = context.ledger, context.last_turn
    if last_turn is not None and last_turn != parent:
        return _allowed(context, _departure(context, last_turn, None), may_branch)
    if not ledger.is_extended(parent) and all(turn.draft.branch != written for turn in ledger):
        return written
    return Branch(Reason.SEPARATE, parent) if last_turn == parent else _outsider(context, parent)


def _allowed(context: HistoryContext, branch: Branch, may_branch: bool) -> Branch:
    """Return a branch in one agent's own history.

    Raises:
        HistoryChangedError: The agent may not change it; the error shows the first message that differs.
    """
    if may_branch:
        return branch
    raise HistoryChangedError(
        f"Law 8: {_what_changed(context, branch)} ({branch}), and history='error' allows no change. Start a new "
        "rollout with model.reset(), or allow branches with history='fork'."
    )


def _outsider(context: HistoryContext, parent: int | None) -> Branch:
    """Link a call without a known agent: to the turn that it forks, or to the last one in its known history."""
    reason = Reason.SEPARATE if context.is_agents else Reason.SIDE_CALL
    if parent is not None:
        return Branch(reason, parent)
    for entry in context.history.node.upward():
        if entry.turns:
            return Branch(reason, max(entry.turns), context.history.known - 1)
    return Branch(reason)


def _departure(context: HistoryContext, last_turn: int, parent: int | None) -> Branch:
    """Return where and why an agent's history left that of its own last turn."""
    change = _change(context)
    if change is None:  # a loaded ledger has only the digest
        reason = Reason.EDIT if parent is None else _retry_or_rewind(context, parent)
        return Branch(reason, last_turn if parent is None else parent)
    if change.at == 0:
        detail = _changed_parts(change.before[0], context.opening)
        return Branch(Reason.OPENING, last_turn if parent is None else parent, detail=detail)
    message = change.at - 1
    if parent is not None:
        return Branch(_retry_or_rewind(context, parent), parent, message)
    return Branch(_reason(context, change), _last_unchanged_turn(context.ledger, last_turn, change), message)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """How an agent's history differs from its earlier one. Both are equal up to item `at` (item 0 is the opening).

    Attributes:
        entries: The history that the agent's own last turn ended, its answer last.
        before: The messages of `entries`.
        now: The new history.
        at: First item that differs, or the length of the shorter one.
    """

    entries: Sequence[Node]
    before: Sequence[Any]
    now: Sequence[Any]
    at: int


def _change(context: HistoryContext) -> _Change | None:
    """Compare an agent's history with the one that its own last turn ended; None where that one is not known."""
    last = None if context.last_turn is None else context.ledger.node_of(context.last_turn)
    if last is None:
        return None
    entries = list(last.upward())[::-1]
    before, now = [entry.message for entry in entries], [context.opening, *context.messages]
    differ = (i for i, (old, new) in enumerate(zip(before, now, strict=False)) if old != new)
    return _Change(entries, before, now, next(differ, min(len(before), len(now))))


def _changed_parts(old: Any, new: dict[str, Any]) -> str:
    names = {"system": "system prompt", "tools": "tools", "template": "template"}
    return " and ".join(name for key, name in names.items() if old[key] != new[key])


def _last_unchanged_turn(ledger: Ledger, last_turn: int, change: _Change) -> int:
    """Return the last turn in the unchanged part, else the agent's last turn; among several, the agent's own."""
    ancestors = set(ledger.lineage(last_turn))
    for entry in reversed(change.entries[: change.at]):
        if entry.turns:
            return max(ancestors.intersection(entry.turns) or entry.turns)
    return last_turn


def _reason(context: HistoryContext, change: _Change) -> Reason:
    """Classify a change after which no turn of the ledger can be extended."""
    before, now, at = change.before, change.now, change.at
    asked_again = _retry_or_rewind(context, None)
    if asked_again == Reason.RETRY:
        return asked_again
    if _resumed(before, now[at:], at + 1) is not None:
        return Reason.TRIM
    if all(message["role"] != "assistant" for message in now[at:]):
        return asked_again
    if at < len(before) and _without_reasoning(before[at]) == now[at]:
        return Reason.THINKING
    kept_from = _resumed(before, now[at + 1 :], at + 1)
    return Reason.SUMMARY if kept_from is not None and kept_from > at + 1 else Reason.EDIT


def _retry_or_rewind(context: HistoryContext, parent: int | None) -> Reason:
    """Return RETRY when the same messages were answered after the same turn before, else REWIND."""
    history, ledger = context.history, context.ledger
    answers = () if history.new else (turn for answer in history.node.children for turn in answer.turns)
    return Reason.RETRY if any(ledger[turn].parent == parent for turn in answers) else Reason.REWIND


def _resumed(before: Sequence[Any], now: Sequence[Any], start: int) -> int | None:
    """Return the first index in `before`, from `start`, whose items `now` starts with; None where there is none.

    The last item of `before` is an answer that a hook may have lost, so it counts only where nothing else is left.
    """
    for first in range(start, len(before)):
        kept = before[first:-1] or before[first:]
        if kept == now[: len(kept)]:
            return first
    return None


def _without_reasoning(message: Any) -> Any:
    """Return an assistant's message without its reasoning, or None for another role or a message without any."""
    if message.get("role") != "assistant":
        return None
    kept = [block for block in message["content"] if "reasoningContent" not in block]
    return {**message, "content": kept or _BLANK} if len(kept) < len(message["content"]) else None


def _what_changed(context: HistoryContext, branch: Branch) -> str:
    change = _change(context)
    if branch.message is None or change is None:
        return f"the {branch.detail or 'history'} changed"
    old, new = change.before[change.at :], change.now[change.at :]
    if not new:
        what = "would be sampled again" if branch.reason == Reason.RETRY else "is missing"
        return f"{_described(branch.message, old[0])} {what}: {_excerpt(old[0])}"
    if not old:
        at, added = next((i, message) for i, message in enumerate(new) if message["role"] == "assistant")
        return f"{_described(branch.message + at, added)} was not sampled here: {_excerpt(added)}"
    return f"{_described(branch.message, new[0])} changed from {_excerpt(old[0])} to {_excerpt(new[0])}"


def _described(index: int, message: Any) -> str:
    return f"message {index} ({message['role']})"


def _excerpt(message: Any) -> str:
    text = " ".join(_strings(message["content"]))
    return repr(text if len(text) <= _EXCERPT_CHARACTERS else text[:_EXCERPT_CHARACTERS] + "...")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _strings(item)]
