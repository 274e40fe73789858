"""Which turn of a ledger a history continues (law 8): found by content, never a cursor, and what is new is checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.message_check import InvalidMessageError, check_bounds, check_messages, check_schemas
from tito_core.chat.word_cache import LONG_TEXT
from tito_core.ledger.branch import Branch, Reason
from tito_core.ledger.history_index import Match, Node
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft, Finish
from tito_core.settings import Settings
from tito_core.turn.branches import HistoryContext, branch_of, lineage, refuse, rewritten_branch
from tito_core.turn.inputs import TurnInput

if TYPE_CHECKING:
    from tito_core.turn.policy_parts import PolicyParts

STATE_KEY = "tito"
"""Our key in Strands' `model_state`, the agent's own channel: {"ledger": uuid, "turn": index}."""
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,64}")

Strips = Callable[[Messages], bool]
Opening = dict[str, Any]
"""What comes before all messages: system prompt, tools, and the template's own fingerprint."""


@dataclass(frozen=True, slots=True, eq=False)
class ParentMatch:
    """Where a history continues.

    Attributes:
        parent: The turn that it extends, or None for a new root.
        answered: Number of leading messages that `parent` accounts for; 0 for a root.
        walk: How far the ledger knows the history.
        branch: Why it does not simply continue the latest turn, or None when it does.
        new_characters: Number of characters of content that are new.
    """

    parent: int | None
    answered: int
    walk: Match
    branch: Branch | None
    new_characters: int = 0

    @property
    def is_long(self) -> bool:
        """Return whether what is new takes milliseconds to encode."""
        return self.new_characters >= LONG_TEXT


def match_parent(policy: PolicyParts, ledger: Ledger, asked: TurnInput, settings: Settings) -> ParentMatch:
    """Find the turn that a history continues, and check the messages that are new after it.

    Raises:
        HistoryChangedError: The agent's history changed, and `history="error"`.
        InvalidMessageError, UnsupportedContentError: The messages cannot become tokens.
    """
    messages, tools = asked.messages, asked.tool_specs
    if not messages:
        raise InvalidMessageError("messages is an empty list: give at least one, such as by agent('Hi').")
    opening = opening_of(asked.system_prompt, tools, policy.template.fingerprint)
    strips = None if settings.thinking == "keep" else policy.template.strips_thinking
    may_branch = settings.history == "fork"
    try:
        match = find_parent(ledger, opening, messages, asked.model_state, may_branch=may_branch, strips=strips)
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError):
        check_messages(messages)  # says what is wrong with them, if that is the reason
        check_schemas(tools)
        check_bounds(messages, "messages")
        raise
    characters = check_messages(messages[match.answered :], match.answered)
    if match.parent is None:
        check_schemas(tools)
        characters += len(asked.system_prompt or "")
    return replace(match, new_characters=characters)


def opening_of(system_prompt: str | None, tool_specs: Sequence[ToolSpec] | None, template: str) -> Opening:
    """Return what comes before all messages. A tool choice is no part of it: no template writes it into the prompt."""
    return {"system": system_prompt or None, "tools": list(tool_specs or ()), "template": template}


def as_shown(message: Message) -> Message:
    """Rewrite an answer of ours as Strands shows it to a provider (strands/event_loop/streaming.py)."""
    content: list[Any] = [_as_shown(block) for block in message["content"]]
    return {"role": "assistant", "content": content or [{"text": "[blank text]"}]}


def _as_shown(block: Any) -> Any:
    if "toolUse" in block and not _TOOL_NAME.fullmatch(block["toolUse"]["name"]):
        return {"toolUse": {**block["toolUse"], "name": "INVALID_TOOL_NAME"}}
    return block


def _told(message: Message) -> Message:
    """Return what of a message becomes tokens; a side call may bring Strands' own notes, such as its metadata."""
    return {"role": message["role"], "content": message["content"]}


def find_parent(
    ledger: Ledger,
    opening: Opening,
    messages: Messages,
    state: Mapping[str, Any] | None,
    *,
    may_branch: bool = True,
    strips: Strips | None = None,
) -> ParentMatch:
    """Find the turn that a history continues, and what it means when that is not simply the latest.

    A turn fits when the history starts with exactly the messages it was committed with, and nothing after them is
    an assistant's (which the engine did not sample in this place). Among several that fit, the agent's own key in
    `state` decides, then the latest commit.

    Args:
        ledger: The ledger.
        opening: What comes before all messages.
        messages: The history.
        state: The agent's own channel, or None for a call outside any agent.
        may_branch: Whether the agent's own history may have changed.
        strips: Tells whether the template strips reasoning before these messages, where the rollout follows it: the
            history then begins anew when the turn that it fits still shows such reasoning.

    Raises:
        HistoryChangedError: `may_branch` is False, and the agent's own history changed.
    """
    messages = [message if len(message) == 2 else _told(message) for message in messages]
    own = _own(ledger, state)
    walk = ledger.match([opening, *messages], own)
    fit = _fit(walk, messages)
    parent, answered = None, 0
    if fit is not None:
        entry, answered = fit
        parent = _chosen(ledger, entry.turns, own)
        ledger.adopt(parent, messages[answered - 1])
    situation = HistoryContext(ledger, walk, opening, messages, own, is_agents=state is not None)
    written = None if parent is None else _rewritten(ledger, walk, messages, (parent, answered), strips)
    if written is not None and parent is not None:
        return ParentMatch(None, 0, walk, rewritten_branch(situation, parent, written, may_branch=may_branch))
    branch = branch_of(situation, parent)
    if not may_branch:
        refuse(situation, branch)
    return ParentMatch(parent, answered, walk, branch)


def remember(state: dict[str, Any] | None, ledger: Ledger, turn: int) -> None:
    """Keep the agent's own key. Strands writes the state back only when the call succeeds."""
    if state is not None:
        state[STATE_KEY] = {"ledger": ledger.uuid, "turn": turn}


def ledger_of(state: Mapping[str, Any] | None) -> str | None:
    """Return the identity of the ledger that an agent's own key names, or None."""
    key = (state or {}).get(STATE_KEY)
    uuid = key.get("ledger") if isinstance(key, Mapping) else None
    return uuid if isinstance(uuid, str) else None


def _own(ledger: Ledger, state: Mapping[str, Any] | None) -> int | None:
    """Return the turn that the agent's own key names, if it is one of this ledger."""
    if ledger_of(state) != ledger.uuid or state is None:
        return None
    turn = state[STATE_KEY].get("turn")
    return turn if isinstance(turn, int) and 0 <= turn < len(ledger) else None


def _fit(walk: Match, messages: Messages) -> tuple[Node, int] | None:
    """Find the deepest known entry that turns end in, with no assistant's message after it, and its depth."""
    if any(message["role"] == "assistant" for message in walk.new if "role" in message):
        return None
    answered = walk.known - 1
    for entry in walk.node.upward():
        if entry.turns:
            return entry, answered
        if answered < 1 or messages[answered - 1]["role"] == "assistant":
            return None
        answered -= 1
    return None


def _rewritten(
    ledger: Ledger, walk: Match, messages: Messages, place: tuple[int, int], strips: Strips | None
) -> Branch | None:
    """Return the branch that the template makes where it cannot write on after what was sampled, or None.

    A stop that was sampled inside reasoning stays where it is: no closer can come before it any more, and no template
    writes it there. And a template that a rollout follows strips reasoning.
    """
    parent, answered = place
    if stopped_in_reasoning(ledger[parent].draft):
        return Branch(Reason.THINKING, parent, answered - 1, "left open")
    if strips is None or not strips(messages[answered:]):
        return None
    stripped = _stripped(messages, answered, _asked_first(ledger, walk, parent), strips)
    return None if stripped is None else Branch(Reason.THINKING, parent, stripped)


def stopped_in_reasoning(draft: Draft) -> bool:
    """Return whether a turn ended by a stop token while its reasoning was open; a stop string is no token."""
    return draft.finish == Finish.STOP and not isinstance(draft.stop, str) and not draft.reasoning_closed


def _asked_first(ledger: Ledger, walk: Match, turn: int) -> int:
    """Count the messages that the root of a turn's path was asked with: what the template itself wrote there."""
    root = ledger.path(turn)[0].index
    depth = walk.known - 1  # without the opening
    for entry in walk.node.upward():
        if root in entry.turns:
            break
        depth -= 1
    return depth - 1


def _stripped(messages: Messages, answered: int, asked_first: int, strips: Strips) -> int | None:
    """Find the first answer whose reasoning a path still shows, where the template now strips it.

    What was sampled is shown, and of the root's own prompt what the template did not strip there.
    """
    first = asked_first
    while first and not strips(messages[first : min(first + 1, asked_first)]):
        first -= 1
    return next((i for i in range(first, answered) if _reasons(messages[i])), None)


def _reasons(message: Message) -> bool:
    return any("reasoningText" in block.get("reasoningContent", {}) for block in message["content"])


def _chosen(ledger: Ledger, fitting: Sequence[int], own: int | None) -> int:
    """Choose the agent's own turn, or the one it went back to: the nearest it came from that fits."""
    return next((turn for turn in lineage(ledger, own) if turn in fitting), max(fitting))
