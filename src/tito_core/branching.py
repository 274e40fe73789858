"""Why a history does not simply go on after the latest turn: what changed, told from its content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strands.types.content import Messages

from tito_core.ledger.branch import OF_ONE_AGENT, Branch, Reason
from tito_core.ledger.histories import Entry, Walk
from tito_core.ledger.ledger import Ledger

_SHOWN = 60
"""Characters of a message that an error shows."""


class HistoryChangedError(ValueError):
    """An agent's history changed, and `history="error"` asked to be told instead of branching (law 8)."""


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """What a call brings.

    Attributes:
        ledger: The ledger.
        walk: How far it knows the history.
        opening: What comes before all messages.
        messages: The history.
        own: The turn that the agent's own key names, or None.
        state: The agent's own channel; None for a call outside any agent.
    """

    ledger: Ledger
    walk: Walk
    opening: dict[str, Any]
    messages: Messages
    own: int | None
    state: dict[str, Any] | None

    @property
    def history(self) -> list[Any]:
        """The opening and the messages."""
        return [self.opening, *self.messages]


def branch_of(situation: Situation, parent: int | None) -> Branch | None:
    """Tell why the coming turn branches, or None when it is the first or simply goes on.

    Args:
        situation: What the call brings.
        parent: The turn that it extends, or None for a new root.
    """
    if parent is not None:
        return _fork(situation, parent)
    if not len(situation.ledger):
        return None
    return _departure(situation) if situation.own is not None else _newcomer(situation)


def _fork(situation: Situation, parent: int) -> Branch | None:
    """Tell why a second turn follows `parent`."""
    ledger, own = situation.ledger, situation.own
    if not ledger.extended(parent):
        return None
    strangers = situation.state is not None and (own is None or (own == parent and situation.walk.new))
    if strangers:
        return Branch(Reason.SEPARATE, parent)
    return Branch(_again(situation, parent), parent)


def _again(situation: Situation, parent: int | None) -> Reason:
    """Tell a retry, the same messages asked again after the same turn, from a rewind."""
    asked = not situation.walk.new and any(
        situation.ledger[turn].parent == parent for child in situation.walk.entry.children for turn in child.turns
    )
    return Reason.RETRY if asked else Reason.REWIND


def _newcomer(situation: Situation) -> Branch:
    """Tell what a history is that comes without an agent's own key and fits nowhere."""
    left = _last_turn(situation.walk.entry, None)
    if left is not None:
        return Branch(Reason.EDIT, left, situation.walk.known - 1)
    return Branch(Reason.SIDE_CALL if situation.state is None else Reason.SEPARATE)


def _departure(situation: Situation) -> Branch:
    """Tell how an agent's history left the path of its own last turn."""
    own = situation.own
    assert own is not None
    before = _known(situation.ledger.entry_of(own))
    if before is None:  # a loaded ledger knows digests only
        return Branch(Reason.EDIT, own)
    now = situation.history
    same = next((i for i, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), None)
    if same is None:
        same = min(len(before), len(now))
    if same == 0:
        return Branch(Reason.OPENING, own, detail=_changed_parts(before[0], situation.opening))
    left = _last_turn(_above(situation.ledger.entry_of(own), len(before) - same), own, situation.ledger)
    asked_anew = all(message["role"] != "assistant" for message in now[same:])
    reason = _again(situation, None) if asked_anew else _edited(before, now, same)
    return Branch(reason, left, same - 1)


def _edited(before: Sequence[Any], now: Sequence[Any], at: int) -> Reason:
    """Name the change of a history that differs from item `at` on and goes on with answers from elsewhere."""
    if at == len(before):
        return Reason.EDIT
    if _without_reasoning(before[at]) == now[at]:
        return Reason.THINKING
    if any(old == now[at] for old in before[at + 1 :]):
        return Reason.TRIM
    follower = now[at + 1] if at + 1 < len(now) else None
    replaced = next((i for i, old in enumerate(before[at + 1 :], 1) if old == follower), 0)
    return Reason.SUMMARY if replaced > 1 else Reason.EDIT


def _without_reasoning(message: Any) -> Any:
    """Give a known assistant's message without its reasoning, or None for one that has none."""
    if message.get("role") != "assistant":
        return None
    kept = [block for block in message["content"] if "reasoningContent" not in block]
    return {**message, "content": kept} if len(kept) < len(message["content"]) else None


def _changed_parts(old: Any, new: dict[str, Any]) -> str:
    names = {"system": "system prompt", "tools": "tools", "template": "template"}
    return " and ".join(name for key, name in names.items() if old[key] != new[key])


def _known(entry: Entry | None) -> list[Any] | None:
    """Give the known history, opening first, that ends in an entry."""
    return None if entry is None else [above.message for above in entry.upward()][::-1]


def _above(entry: Entry | None, steps: int) -> Entry:
    assert entry is not None
    for _ in range(steps):
        assert entry.above is not None
        entry = entry.above
    return entry


def _last_turn(entry: Entry, own: int | None, ledger: Ledger | None = None) -> int | None:
    """Give the latest turn that ends in or above an entry: of the agent's own path where `own` is given."""
    path = {turn.index for turn in ledger.path(own)} if ledger is not None and own is not None else None
    for above in entry.upward():
        turns = [turn for turn in above.turns if path is None or turn in path]
        if turns:
            return max(turns)
    return None


def refuse(situation: Situation, branch: Branch | None) -> None:
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


def _what_changed(situation: Situation, branch: Branch) -> str:
    if branch.message is None:
        return f"the {branch.detail or 'history'} changed"
    now = situation.messages[branch.message :][:1]
    known = _known(situation.ledger.entry_of(situation.own)) if situation.own is not None else None
    before = (known or [])[branch.message + 1 :][:1]
    shown = " became ".join(_excerpt(message) for message in (*before, *now)) if before and now else "it is not there"
    role = (now or before or [{"role": "gone"}])[0]["role"]
    return f"message {branch.message} ({role}) changed: {shown}"


def _excerpt(message: Any) -> str:
    words = " ".join(_strings(message["content"]))
    return repr(words if len(words) <= _SHOWN else words[:_SHOWN] + "...")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _strings(item)]
