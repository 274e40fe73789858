"""Find the turn of a ledger that a history continues, and why it branches (law 8): by content, never by a cursor.

A turn fits when the history starts with exactly the messages that it was committed with, and has no assistant message
after them: the engine did not sample such a message there. Among several, the agent's own key decides, then the latest
commit. Why the next turn branches is answered by three questions, in this order:

1. Is the position new? A turn that is the first after its parent, or the first of all, is not a branch.
2. Who calls? A call outside any agent is a side call. An agent is separate if its key names no turn of this ledger, or
   if the turn that its key names was continued: by another agent, or by itself where its key went back too, as by
   Strands' `load_snapshot` or an older session. The key is all that tells them apart.
3. What did the agent do? The history that ended with the agent's own last turn is compared with its history now. The
   first difference gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.encoder import LONG_TEXT
from tito_core.chat.message_check import InvalidMessageError, check_bounds, check_messages, check_schemas
from tito_core.ledger.errors import TITOError
from tito_core.ledger.history import Match, Node
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import OF_ONE_AGENT, Branch, Draft, Finish, Reason
from tito_core.settings import Settings
from tito_core.turn.inputs import TurnInput

if TYPE_CHECKING:
    from tito_core.policy import PolicyParts


STATE_KEY = "tito"
"""Our key in Strands' `model_state`, the agent's own channel: {"ledger": uuid, "turn": index}."""

_BLANK = [{"text": "[blank text]"}]
"""What Strands shows for an answer without content (strands/event_loop/streaming.py)."""
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,64}")
_EXCERPT_CHARACTERS = 60
"""Maximum characters of a message in an error."""


class HistoryChangedError(TITOError, ValueError):
    """An agent's history changed, and `history="error"` forbids branches (law 8)."""


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
    messages = [message if len(message) == 2 else _role_and_content(message) for message in messages]
    last_turn = last_turn_of(ledger, state)
    history = ledger.match([opening, *messages], last_turn)
    fit = _deepest_fit(history, messages)
    parent, path_messages = None, 0
    if fit is not None:
        entry, path_messages = fit
        parent = _choose(ledger, entry.turns, last_turn)
        ledger.adopt(parent, messages[path_messages - 1])
    context = HistoryContext(ledger, history, opening, messages, last_turn, is_agents=state is not None)
    written = None if parent is None else _branch_by_template(ledger, history, messages, parent, path_messages, strips)
    if written is not None and parent is not None:
        return ParentMatch(None, 0, history, rewritten_branch(context, parent, written, may_branch=may_branch))
    branch = branch_of(context, parent)
    if not may_branch:
        refuse(context, branch)
    return ParentMatch(parent, path_messages, history, branch)


def _deepest_fit(history: Match, messages: Messages) -> tuple[Node, int] | None:
    """Return the deepest known entry in which turns end, with no assistant message after it, and its depth."""
    if any(message["role"] == "assistant" for message in history.new if "role" in message):
        return None
    path_messages = history.known - 1
    for entry in history.node.upward():
        if entry.turns:
            return entry, path_messages
        if path_messages < 1 or messages[path_messages - 1]["role"] == "assistant":
            return None
        path_messages -= 1
    return None


def _choose(ledger: Ledger, fitting: Sequence[int], last_turn: int | None) -> int:
    """Return the agent's own turn or its nearest ancestor that fits, else the latest that fits."""
    return next((turn for turn in lineage(ledger, last_turn) if turn in fitting), max(fitting))


def lineage(ledger: Ledger, turn: int | None) -> Iterator[int]:
    """Yield a turn and its ancestors, nearest first: its path, and past each root the turn that the root left."""
    while turn is not None:
        yield turn
        draft = ledger[turn].draft
        turn = draft.parent if draft.parent is not None or draft.branch is None else draft.branch.turn


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
    last_turn = last_turn_of(ledger, turn_input.model_state)
    node = None if last_turn is None else ledger.node_of(last_turn)
    before = None if node is None else [*node.upward()][-1].message
    opening = opening_of(turn_input.system_prompt, specs, policy.template.fingerprint)
    if before is None or specs[0] not in before["tools"] or {**before, "tools": opening["tools"]} != opening:
        return turn_input
    return turn_input.choosing(before["tools"], specs[0]["name"])


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


def branch_of(context: HistoryContext, parent: int | None) -> Branch | None:
    """Return why the next turn branches, or None when it is the first or continues its parent.

    Args:
        context: The history and its caller.
        parent: The turn that it extends, or None for a new root.
    """
    ledger = context.ledger
    is_taken = len(ledger) > 0 if parent is None else ledger.extended(parent)
    if not is_taken:
        return None
    if context.last_turn is None:
        return _outsider(context, parent)
    if context.last_turn == parent:  # by its key it did not change its history: another one continued from its turn
        return Branch(Reason.SEPARATE, parent)
    return _departure(context, context.last_turn, parent)


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
        branch = _departure(context, last_turn, None)
        if not may_branch:
            refuse(context, branch)
        return branch
    if not ledger.extended(parent) and all(turn.draft.branch != written for turn in ledger):
        return written
    return Branch(Reason.SEPARATE, parent) if last_turn == parent else _outsider(context, parent)


def refuse(context: HistoryContext, branch: Branch | None) -> None:
    """Refuse a branch in one agent's own history; branches of separate agents and side calls are allowed.

    Raises:
        HistoryChangedError: The agent's history changed; the error shows the first message that differs.
    """
    if branch is None or branch.reason not in OF_ONE_AGENT:
        return
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
    ancestors = set(lineage(ledger, last_turn))
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


def _role_and_content(message: Message) -> Message:
    """Return the parts of a message that become tokens; in a side call, messages may hold Strands' metadata too."""
    return {"role": message["role"], "content": message["content"]}
