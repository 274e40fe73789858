"""Find the turn of a ledger that a history continues (law 8): by content, never by a cursor.

A turn fits when the history starts with exactly the messages that it was committed with, and has no assistant message
after them: the engine did not sample such a message there. Among several, the agent's own key decides, then the latest
commit. `find_parent` decides it, and a template that writes earlier answers anew may undo it. The ledger only compares
messages (`Ledger.match`); why a turn branches is told in branch.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.encoder import LONG_TEXT
from tito_core.chat.message_check import InvalidMessageError, check_bounds, check_messages, check_schemas
from tito_core.ledger.history import Match, plain_copy
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Branch, Draft, Finish, Reason
from tito_core.settings import Settings
from tito_core.turn.branch import HistoryChangedError, HistoryContext, branch_of, rewritten_branch
from tito_core.turn.inputs import TurnInput

if TYPE_CHECKING:
    from tito_core.policy import PolicyParts


STATE_KEY = "tito"
"""Our key in Strands' `model_state`, the agent's own channel: {"ledger": uuid, "turn": index}."""

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,64}")


class ParentMatch(msgspec.Struct, frozen=True, eq=False):
    """Where a history continues.

    Attributes:
        parent: The turn that it extends, or None for a new root.
        path_messages: Number of messages up to the answer of `parent`, this answer included; 0 for a root.
        history: How much of the history the ledger knows.
        branch: Why it does not simply continue its parent, or begin the ledger; else None.
        new_characters: Number of characters in the new content.
    """

    parent: int | None
    path_messages: int
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
    except HistoryChangedError:
        raise
    except Exception:
        # Only new messages are checked, below: those that the ledger knows were new once (law 14). Where a value cannot
        # even be compared, these checks name it.
        check_messages(messages)
        check_schemas(tools)
        check_bounds(messages, "messages")
        raise
    characters = check_messages(messages[match.path_messages :], match.path_messages)
    if match.parent is None:
        check_schemas(tools)
        characters += len(turn_input.system_prompt or "")
    return msgspec.structs.replace(match, new_characters=characters)


def hash_new(match: ParentMatch, messages: Messages) -> None:
    """Compute the digests of the new messages, before anything is sent.

    Raises:
        InvalidMessageError: A value cannot be stored.
    """
    try:
        match.history.hash_new(in_pieces=match.is_long)
    except Exception:
        check_bounds(messages, "messages")
        raise


Strips = Callable[[Messages], bool]
Opening = dict[str, Any]
"""What comes before all messages: the system prompt, the tools, and the template's fingerprint."""


def find_parent(
    ledger: Ledger,
    opening: Opening,
    messages: Messages,
    state: Mapping[str, Any] | None,
    *,
    may_branch: bool = True,
    strips: Strips | None = None,
) -> ParentMatch:
    """Find the turn that a history continues, and the reason for a branch when it does not simply continue that turn.

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
    if not {2}.issuperset(map(len, messages)):  # no call of ours for each message (law 14)
        messages = [*map(_role_and_content, messages)]
    last_turn = last_turn_of(ledger, state)
    history = ledger.match([opening, *messages], last_turn)
    fitting, path_messages = _fitting_turns(history, messages)
    parent = written = None
    if fitting:  # the agent's own turn or its nearest ancestor, else the latest
        parent = next((turn for turn in ledger.lineage(last_turn) if turn in fitting), max(fitting))
        ledger.adopt(parent, messages[path_messages - 1])
        written = _branch_by_template(ledger, history, messages, parent, path_messages, strips)
    if written is None and not (len(ledger) if parent is None else ledger.is_extended(parent)):
        return ParentMatch(parent, path_messages, history, None)
    context = HistoryContext(ledger, history, opening, messages, last_turn, is_agents=state is not None)
    if written is not None and parent is not None:
        return ParentMatch(None, 0, history, rewritten_branch(context, parent, written, may_branch=may_branch))
    return ParentMatch(parent, path_messages, history, branch_of(context, parent, may_branch=may_branch))


def _fitting_turns(history: Match, messages: Messages) -> tuple[Sequence[int], int]:
    """Return the turns that fit, and the number of messages up to their answer."""
    path_messages = history.known - 1
    if not any(message["role"] == "assistant" for message in messages[path_messages:]):
        for entry in history.node.upward():
            if entry.turns:
                return entry.turns, path_messages
            if path_messages < 1 or messages[path_messages - 1]["role"] == "assistant":
                break
            path_messages -= 1
    return (), 0


def _branch_by_template(
    ledger: Ledger, history: Match, messages: Messages, parent: int, path_messages: int, strips: Strips | None
) -> Branch | None:
    """Return the branch for a template that cannot continue the sampled tokens, or None if it can.

    There are two cases:

    1. The parent sampled a stop token inside its reasoning. The delta comes after that token, so it cannot close the
       reasoning before it. No template renders a stop token inside reasoning.
    2. The template strips the reasoning of earlier answers, and the rollout follows the template.
    """
    if stopped_in_reasoning(ledger[parent].draft):
        return Branch(Reason.THINKING, parent, path_messages - 1, "left open")
    if strips is None or not strips(messages[path_messages:]):
        return None
    stripped = _first_stripped(messages, path_messages, _root_messages(ledger, history, parent), strips)
    return None if stripped is None else Branch(Reason.THINKING, parent, stripped)


def stopped_in_reasoning(draft: Draft) -> bool:
    """Return whether a turn ended by a stop token while its reasoning was open; a stop string does not count."""
    return draft.finish == Finish.STOP and not isinstance(draft.stop, str) and not draft.reasoning_closed


def _first_stripped(messages: Messages, path_messages: int, root_messages: int, strips: Strips) -> int | None:
    """Return the index of the first answer whose reasoning is in the path's tokens and is stripped now, or None.

    The path's tokens hold the reasoning of sampled answers, and in the root's prompt what the template kept.
    """
    first = root_messages
    while first and not strips(messages[first : min(first + 1, root_messages)]):
        first -= 1
    return next((i for i in range(first, path_messages) if _has_reasoning(messages[i])), None)


def _root_messages(ledger: Ledger, history: Match, turn: int) -> int:
    """Count the messages in the prompt of the root of a turn's path, which the template rendered at once."""
    root = ledger.path(turn)[0].index
    depth = history.known - 1  # without the opening
    for entry in history.node.upward():
        if root in entry.turns:
            break
        depth -= 1
    return depth - 1


def _has_reasoning(message: Message) -> bool:
    return any("reasoningText" in block.get("reasoningContent", {}) for block in message["content"])


def with_prompt_tools(policy: PolicyParts, ledger: Ledger, turn_input: TurnInput) -> TurnInput:
    """Return a call that is forced by leaving out all other tools as a choice among the tools that the prompt shows.

    For an agent's structured output, Strands asks again with only the tool of the schema; the agent still has the
    others, and the path's prompt shows them. A branch for each answer would double the rollout's tokens. The choice of
    one of the shown tools is the same request: the grammar allows this tool only.
    """
    specs = turn_input.tool_specs or ()
    if len(specs) != 1 or not turn_input.constraint.forces_call:
        return turn_input
    if turn_input.constraint.forced_tools({specs[0]["name"]: {}}) != (specs[0]["name"],):
        return turn_input  # a choice of another tool, which is refused later
    last_turn = last_turn_of(ledger, turn_input.model_state)
    node = None if last_turn is None else ledger.node_of(last_turn)
    before = None if node is None else [*node.upward()][-1].message
    opening = opening_of(turn_input.system_prompt, specs, policy.template.fingerprint)
    if before is None or specs[0] not in before["tools"] or {**before, "tools": opening["tools"]} != opening:
        return turn_input
    return turn_input.choosing(plain_copy(before["tools"]), specs[0]["name"])


def opening_of(system_prompt: str | None, tool_specs: Sequence[ToolSpec] | None, template: str) -> Opening:
    """Return what comes before all messages. A tool choice is not included: no template writes it into the prompt."""
    return {"system": system_prompt or None, "tools": list(tool_specs or ()), "template": template}


def as_stored(message: Message) -> Message:
    """Return an answer of ours as Strands shows it to a provider (strands/event_loop/streaming.py)."""
    content: list[Any] = [_as_stored(block) for block in message["content"]]
    return {"role": "assistant", "content": content or [{"text": "[blank text]"}]}


def _as_stored(block: Any) -> Any:
    if "toolUse" in block and not _TOOL_NAME.fullmatch(block["toolUse"]["name"]):
        return {"toolUse": {**block["toolUse"], "name": "INVALID_TOOL_NAME"}}
    return block


def remember(state: dict[str, Any] | None, ledger: Ledger, turn: int) -> None:
    """Write the agent's own key into its state. Strands keeps the state only when the call succeeds."""
    if state is not None:
        state[STATE_KEY] = {"ledger": ledger.uuid, "turn": turn}


def ledger_of(state: Mapping[str, Any] | None) -> str | None:
    """Return the uuid of the ledger that an agent's own key names, or None."""
    key = (state or {}).get(STATE_KEY)
    uuid = key.get("ledger") if isinstance(key, Mapping) else None
    return uuid if isinstance(uuid, str) else None


def last_turn_of(ledger: Ledger, state: Mapping[str, Any] | None) -> int | None:
    """Return the turn that the agent's own key names, if it is one of this ledger."""
    if ledger_of(state) != ledger.uuid or state is None:
        return None
    turn = state[STATE_KEY].get("turn")
    return turn if isinstance(turn, int) and 0 <= turn < len(ledger) else None


def _role_and_content(message: Message) -> Message:
    """Return the parts of a message that become tokens; in a side call, messages may hold Strands' metadata too."""
    return {"role": message["role"], "content": message["content"]}
