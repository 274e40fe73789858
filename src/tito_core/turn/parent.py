"""Find the turn of a ledger that a history continues (law 8): by content, never by a cursor. Check the new messages."""

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
"""What comes before all messages: the system prompt, the tools, and the template's fingerprint."""


@dataclass(frozen=True, slots=True, eq=False)
class ParentMatch:
    """Where a history continues.

    Attributes:
        parent: The turn that it extends, or None for a new root.
        answered: Number of messages up to the answer of `parent`, this answer included; 0 for a root.
        history: How much of the history the ledger knows.
        branch: Why it does not continue the latest turn, or None when it does.
        new_characters: Number of characters in the new content.
    """

    parent: int | None
    answered: int
    history: Match
    branch: Branch | None
    new_characters: int = 0

    @property
    def is_long(self) -> bool:
        """Whether the new content takes milliseconds to encode."""
        return self.new_characters >= LONG_TEXT


def match_parent(policy: PolicyParts, ledger: Ledger, turn_input: TurnInput, settings: Settings) -> ParentMatch:
    """Find the turn that a history continues, and check the messages that are new after it.

    Raises:
        HistoryChangedError: The agent's history changed, and `history="error"`.
        InvalidMessageError, UnsupportedContentError: The messages cannot become tokens.
    """
    messages, tools = turn_input.messages, turn_input.tool_specs
    if not messages:
        raise InvalidMessageError("messages is an empty list. Pass at least one message, for example by agent('Hi').")
    opening, state = opening_of(turn_input.system_prompt, tools, policy.template.fingerprint), turn_input.model_state
    strips = None if settings.thinking == "keep" else policy.template.strips_thinking
    may_branch = settings.history == "fork"
    try:
        match = find_parent(ledger, opening, turn_input.history, state, may_branch=may_branch, strips=strips)
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError):
        check_messages(messages)  # raises a clear error if they are the reason
        check_schemas(tools)
        check_bounds(messages, "messages")
        raise
    characters = check_messages(messages[match.answered :], match.answered)
    if match.parent is None:
        check_schemas(tools)
        characters += len(turn_input.system_prompt or "")
    return replace(match, new_characters=characters)


def with_shown_tools(policy: PolicyParts, ledger: Ledger, turn_input: TurnInput) -> TurnInput:
    """Return a call that is forced by leaving out all other tools as a choice among the tools that the prompt shows.

    For an agent's structured output, Strands asks again with only the tool of the schema; the agent still has the
    others, and the path's prompt shows them. A branch for each answer would double the rollout's tokens. The choice of
    one of the shown tools is the same request: the grammar allows this tool only.
    """
    specs = turn_input.tool_specs or ()
    own = own_turn(ledger, turn_input.model_state)
    if len(specs) != 1 or own is None or not turn_input.constraint.forces_call:
        return turn_input
    shown = [*node.upward()][-1].message if (node := ledger.node_of(own)) is not None else None
    opening = opening_of(turn_input.system_prompt, specs, policy.template.fingerprint)
    if shown is None or specs[0] not in shown["tools"] or {**shown, "tools": opening["tools"]} != opening:
        return turn_input
    return turn_input.choosing(shown["tools"], specs[0]["name"])


def opening_of(system_prompt: str | None, tool_specs: Sequence[ToolSpec] | None, template: str) -> Opening:
    """Return what comes before all messages. A tool choice is not included: no template writes it into the prompt."""
    return {"system": system_prompt or None, "tools": list(tool_specs or ()), "template": template}


def as_shown(message: Message) -> Message:
    """Return an answer of ours as Strands shows it to a provider (strands/event_loop/streaming.py)."""
    content: list[Any] = [_as_shown(block) for block in message["content"]]
    return {"role": "assistant", "content": content or [{"text": "[blank text]"}]}


def _as_shown(block: Any) -> Any:
    if "toolUse" in block and not _TOOL_NAME.fullmatch(block["toolUse"]["name"]):
        return {"toolUse": {**block["toolUse"], "name": "INVALID_TOOL_NAME"}}
    return block


def _role_and_content(message: Message) -> Message:
    """Return the parts of a message that become tokens; in a side call, messages may hold Strands' metadata too."""
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
    """Find the turn that a history continues, and the reason for a branch when that is not the latest turn.

    A turn fits when the history starts with exactly the messages that it was committed with, and has no assistant
    message after them (the engine did not sample such a message there). Among several that fit, the agent's own key
    in `state` decides, then the latest commit.

    Args:
        ledger: The ledger.
        opening: What comes before all messages.
        messages: The history.
        state: Strands' `model_state` of the agent, or None for a call outside any agent.
        may_branch: Whether the agent may change its own history.
        strips: Returns whether the template strips reasoning before these messages. None when the rollout keeps
            sampled reasoning. The history starts a new root when the turn that it fits still shows such reasoning.

    Raises:
        HistoryChangedError: `may_branch` is False, and the agent's own history changed.
    """
    messages = [message if len(message) == 2 else _role_and_content(message) for message in messages]
    own = own_turn(ledger, state)
    history = ledger.match([opening, *messages], own)
    fit = _deepest_fit(history, messages)
    parent, answered = None, 0
    if fit is not None:
        entry, answered = fit
        parent = _choose(ledger, entry.turns, own)
        ledger.adopt(parent, messages[answered - 1])
    context = HistoryContext(ledger, history, opening, messages, own, is_agents=state is not None)
    written = None if parent is None else _branch_by_template(ledger, history, messages, (parent, answered), strips)
    if written is not None and parent is not None:
        return ParentMatch(None, 0, history, rewritten_branch(context, parent, written, may_branch=may_branch))
    branch = branch_of(context, parent)
    if not may_branch:
        refuse(context, branch)
    return ParentMatch(parent, answered, history, branch)


def remember(state: dict[str, Any] | None, ledger: Ledger, turn: int) -> None:
    """Write the agent's own key into its state. Strands keeps the state only when the call succeeds."""
    if state is not None:
        state[STATE_KEY] = {"ledger": ledger.uuid, "turn": turn}


def ledger_of(state: Mapping[str, Any] | None) -> str | None:
    """Return the uuid of the ledger that an agent's own key names, or None."""
    key = (state or {}).get(STATE_KEY)
    uuid = key.get("ledger") if isinstance(key, Mapping) else None
    return uuid if isinstance(uuid, str) else None


def own_turn(ledger: Ledger, state: Mapping[str, Any] | None) -> int | None:
    """Return the turn that the agent's own key names, if it is one of this ledger."""
    if ledger_of(state) != ledger.uuid or state is None:
        return None
    turn = state[STATE_KEY].get("turn")
    return turn if isinstance(turn, int) and 0 <= turn < len(ledger) else None


def _deepest_fit(history: Match, messages: Messages) -> tuple[Node, int] | None:
    """Return the deepest known entry in which turns end, with no assistant message after it, and its depth."""
    if any(message["role"] == "assistant" for message in history.new if "role" in message):
        return None
    answered = history.known - 1
    for entry in history.node.upward():
        if entry.turns:
            return entry, answered
        if answered < 1 or messages[answered - 1]["role"] == "assistant":
            return None
        answered -= 1
    return None


def _branch_by_template(
    ledger: Ledger, history: Match, messages: Messages, parent_and_answered: tuple[int, int], strips: Strips | None
) -> Branch | None:
    """Return the branch for a template that cannot continue the sampled tokens, or None if it can.

    There are two cases:

    1. The parent sampled a stop token inside its reasoning. The delta comes after that token, so it cannot close the
       reasoning before it. No template renders a stop token inside reasoning.
    2. The template strips the reasoning of earlier answers, and the rollout follows the template.
    """
    parent, answered = parent_and_answered
    if stopped_in_reasoning(ledger[parent].draft):
        return Branch(Reason.THINKING, parent, answered - 1, "left open")
    if strips is None or not strips(messages[answered:]):
        return None
    stripped = _first_stripped(messages, answered, _root_messages(ledger, history, parent), strips)
    return None if stripped is None else Branch(Reason.THINKING, parent, stripped)


def stopped_in_reasoning(draft: Draft) -> bool:
    """Return whether a turn ended by a stop token while its reasoning was open; a stop string does not count."""
    return draft.finish == Finish.STOP and not isinstance(draft.stop, str) and not draft.reasoning_closed


def _root_messages(ledger: Ledger, history: Match, turn: int) -> int:
    """Count the messages in the prompt of the root of a turn's path, which the template rendered at once."""
    root = ledger.path(turn)[0].index
    depth = history.known - 1  # without the opening
    for entry in history.node.upward():
        if root in entry.turns:
            break
        depth -= 1
    return depth - 1


def _first_stripped(messages: Messages, answered: int, root_messages: int, strips: Strips) -> int | None:
    """Return the index of the first answer whose reasoning is in the path's tokens and is stripped now, or None.

    The path's tokens hold the reasoning of sampled answers, and in the root's prompt what the template kept.
    """
    first = root_messages
    while first and not strips(messages[first : min(first + 1, root_messages)]):
        first -= 1
    return next((i for i in range(first, answered) if _has_reasoning(messages[i])), None)


def _has_reasoning(message: Message) -> bool:
    return any("reasoningText" in block.get("reasoningContent", {}) for block in message["content"])


def _choose(ledger: Ledger, fitting: Sequence[int], own: int | None) -> int:
    """Return the agent's own turn or its nearest ancestor that fits, else the latest that fits."""
    return next((turn for turn in lineage(ledger, own) if turn in fitting), max(fitting))
