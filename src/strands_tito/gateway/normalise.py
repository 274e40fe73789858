"""Recognise a harness's own spelling of messages that a ledger knows, by a closed list of named differences.

A harness sends its whole conversation with every request, and few send an answer back exactly as they got it. Without
this module each difference is a new branch (law 8). With it, what the ledger knows takes the place of what the harness
sent, so that the turn after it extends the tokens that were sampled. Nothing else is changed: what no name covers is a
branch with its reason.

The list has a version, `VERSION`, which changes with what a name covers. Each use is recorded with its turn.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.ledger.history import Node, extended, plain_copy, strict
from tito_core.ledger.ledger import Ledger
from tito_core.turn.history import opening_of

VERSION = 1
NORMALISERS = ("arguments", "blanks", "defaults", "ids", "reasoning", "reminders", "volatile")
ARGUMENTS, BLANKS, DEFAULTS, IDS, REASONING, REMINDERS, VOLATILE = NORMALISERS
"""What may differ from an answer of the ledger, or from a conversation's opening:

- arguments: numbers of a call's arguments that are the same value in JSON, such as 1 and 1.0.
- blanks: blanks at the start and the end of an answer's text or reasoning.
- defaults: arguments that the policy left out and the harness added, each the default of the tool's schema.
- ids: the ids of an answer's calls, and of the results that name them.
- reasoning: an answer's reasoning is left out.
- reminders: last parts `<system-reminder>` of the user's message, which were there for one request only.
- volatile: lines of the system prompt that change with each request; see `_VOLATILE`.
"""
_VOLATILE = re.compile(r"^(x-anthropic-billing-header:).*$", re.MULTILINE)
"""Lines that a harness makes anew for each request. Claude Code 2 begins its system prompt with one."""


_REMINDER = re.compile(r"\s*<system-reminder>.*</system-reminder>\s*", re.DOTALL)
"""What a harness adds to a conversation's last message. strands-harness 0.3 leaves it out of the next requests."""


class Recognised(NamedTuple):
    """A history as the ledger knows it.

    Attributes:
        system: The system prompt.
        messages: The messages.
        used: How often each normaliser was needed.
        node: Where the known beginning ends, or None if not even the opening is known.
        digest: Digest of the whole history.
        answer: The last assistant message, where it is a sampled answer; else None.
    """

    system: str | None
    messages: Messages
    used: Mapping[str, int]
    node: Node | None
    digest: bytes
    answer: Node | None


class _Way(NamedTuple):
    """A known beginning of a history: the last node, how many sampled answers it has, and its differences."""

    node: Node
    answers: int = 0
    used: tuple[str, ...] = ()
    ids: Mapping[str, str] = {}

    @property
    def rank(self) -> tuple[int, int, int]:
        """More answers first; among as many, equal ids, which no two answers share; then fewer differences."""
        return self.answers, -self.used.count(IDS), -len(self.used)


def recognise(
    ledger: Ledger,
    system: str | None,
    tools: Sequence[ToolSpec] | None,
    template: str,
    messages: Messages,
    allowed: Collection[str] = NORMALISERS,
) -> Recognised:
    """Replace the messages that a ledger knows in another spelling by its own.

    Several siblings may have a message's spelling. All of them are followed, and the best way is taken: see `_Way`.

    Args:
        ledger: The ledger.
        system: The system prompt, or None.
        tools: The tools.
        template: The fingerprint of the policy's template.
        messages: The whole history.
        allowed: The normalisers to use.
    """
    used: tuple[str, ...] = ()
    opening = opening_of(system, tools, template)
    match = ledger.match([opening])
    node: Node | None = match.node if match.known else None
    if node is None and VOLATILE in allowed:
        node = next((each for each in match.root.children if _steady(each.message) == _steady(opening)), None)
        if node is not None:
            used, system = (VOLATILE,), node.message["system"]
    if node is None:
        return Recognised(system, messages, {}, None, _digest(b"", [opening, *messages]), None)
    levels = [[_Way(node, used=used)]]
    for message in messages:
        ways = [longer for way in levels[-1] for longer in _longer(way, message, tools or (), allowed)]
        if not ways:
            break
        levels.append(ways)
    best = max((way for ways in reversed(levels) for way in ways), key=lambda way: way.rank)
    nodes = [*best.node.upward()][::-1][1:]
    known = [
        plain_copy(node.message) if node.message != message else message
        for node, message in zip(nodes, messages, strict=False)
    ]
    new = messages[len(nodes) :]
    known += [_with_ids(each, best.ids) for each in new[:1]] + new[1:]
    answered = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    answer = nodes[answered] if 0 <= answered < len(nodes) and nodes[answered].turns else None
    digest = _digest(best.node.digest, known[len(nodes) :])
    return Recognised(system, known, Counter(best.used), best.node, digest, answer)


def _digest(digest: bytes, items: Sequence[Any]) -> bytes:
    for item in items:
        digest = extended(digest, item)
    return digest


def key_of_answer(messages: Sequence[Message], tools: Sequence[ToolSpec] | None) -> str:
    """Return a key of the last assistant message that every spelling of it has, or "" where there is none."""
    answer = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
    if answer is None:
        return ""
    _, text, calls = _parts(answer)
    made = []
    for call in calls:
        given, name = plain_copy(call["input"]), call["name"]
        if isinstance(given, dict):
            given = {key: value for key, value in given.items() if not _are_defaults({key: value}, name, tools or ())}
        made.append([name, given])
    return _as_json([text.strip(), made])


def latest_turn(node: Node | None) -> int | None:
    """Return the latest turn that answered at or after a node, or None."""
    stack, turns = [node] if node is not None else [], list[int]()
    while stack:
        each = stack.pop()
        turns += each.turns
        stack += each.children
    return max(turns, default=None)


def _steady(opening: Mapping[str, Any]) -> dict[str, Any]:
    return {**opening, "system": _VOLATILE.sub(r"\1", opening["system"] or "")}


def _longer(way: _Way, message: Message, tools: Sequence[ToolSpec], allowed: Collection[str]) -> list[_Way]:
    """Return the ways on which the ledger knows one more message, newest first."""
    if message["role"] == "user":
        message = _with_ids(message, way.ids)
        if (known := way.node.child(message)) is not None:
            return [way._replace(node=known)]
        had = [each for each in way.node.children if REMINDERS in allowed and _reminded(each.message, message)]
        return [way._replace(node=each, used=(*way.used, REMINDERS)) for each in had]
    ways = []
    for child in way.node.children:
        differences = set() if child.message == message else _differences(child, message, tools)
        if differences is not None and differences.issubset(allowed):
            ids = dict(zip(_call_ids(message), _call_ids(child.message), strict=True)) if differences else {}
            ways.append(_Way(child, way.answers + bool(child.turns), (*way.used, *differences), ids))
    return ways


def _reminded(known: Mapping[str, Any], message: Message) -> bool:
    """Return whether the ledger's message is the user's message with reminders after it."""
    own, content = message["content"], known["content"]
    added = [part.get("text", "") for part in content[len(own) :]]
    return bool(added) and content[: len(own)] == own and all(map(_REMINDER.fullmatch, added))


def _differences(answer: Node, message: Message, tools: Sequence[ToolSpec]) -> set[str] | None:
    """Return the normalisers that make a sampled answer and a message equal, or None if none do."""
    (reasoning, text, calls), (own_reasoning, own_text, own_calls) = _parts(answer.message), _parts(message)
    ids = _call_ids(message)
    if not answer.turns or [call["name"] for call in calls] != [call["name"] for call in own_calls]:
        return None
    used = {REASONING} if reasoning and not own_reasoning else set()
    for known, own in ((reasoning, own_reasoning or reasoning), (text, own_text)):
        if known.strip() != own.strip():
            return None
        used |= {BLANKS} if known != own else set()
    if ids != _call_ids(answer.message):
        if len(set(ids)) < len(ids):  # whose result is whose would be a guess
            return None
        used.add(IDS)
    for call, own in zip(calls, own_calls, strict=True):
        if call["input"] != own["input"]:
            sent, sampled = own["input"], plain_copy(call["input"])
            if not isinstance(sent, dict):
                return None
            added = {name: value for name, value in sent.items() if name not in sampled}
            if added and not _are_defaults(added, call["name"], tools):
                return None
            if _as_json(sampled | added) != _as_json(sent):
                return None
            used |= {DEFAULTS} if added else set()
            used |= {ARGUMENTS} if strict(sampled | added) != sent else set()
    return used


def _are_defaults(added: Mapping[str, Any], name: str, tools: Sequence[ToolSpec]) -> bool:
    """Return whether added arguments of a call are the defaults of its tool's schema."""
    schema: Any = next((tool["inputSchema"]["json"] for tool in tools if tool["name"] == name), None)
    declared = schema.get("properties") if isinstance(schema, dict) else None  # a schema is not checked yet
    return isinstance(declared, dict) and all(
        isinstance(declared.get(key), dict) and "default" in declared[key] and strict(declared[key]["default"]) == value
        for key, value in added.items()
    )


def _parts(message: Mapping[str, Any]) -> tuple[str, str, list[Any]]:
    """Return an assistant message's reasoning, text and calls."""
    blocks = message["content"]
    reasoning = [b["reasoningContent"]["reasoningText"]["text"] for b in blocks if "reasoningContent" in b]
    text = [block["text"] for block in blocks if "text" in block]
    return "".join(reasoning), "".join(text), [block["toolUse"] for block in blocks if "toolUse" in block]


def _as_json(value: Any) -> str:
    """Return the JSON of a value, in which 1.0 is 1, as JavaScript writes it."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _call_ids(message: Message) -> list[str]:
    return [block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block]


def _with_ids(message: Message, ids: Mapping[str, str]) -> Message:
    """Return a message whose results name the ledger's calls."""
    if not ids:
        return message
    content: list[Any] = [
        {"toolResult": {**result, "toolUseId": ids.get(result["toolUseId"], result["toolUseId"])}}
        if (result := block.get("toolResult"))
        else block
        for block in message["content"]
    ]
    return {"role": message["role"], "content": content}
