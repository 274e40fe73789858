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
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.ledger.history import Node, extended, plain_copy, strict
from tito_core.ledger.ledger import Ledger
from tito_core.turn.history import opening_of

VERSION = 1
NORMALISERS = ("arguments", "blanks", "defaults", "ids", "reasoning", "volatile")
ARGUMENTS, BLANKS, DEFAULTS, IDS, REASONING, VOLATILE = NORMALISERS
"""What may differ from an answer of the ledger, or from a conversation's opening:

- arguments: numbers of a call's arguments that are the same value in JSON, such as 1 and 1.0.
- blanks: blanks at the start and the end of an answer's text or reasoning.
- defaults: arguments that the policy left out and the harness added, each the default of the tool's schema.
- ids: the ids of an answer's calls, and of the results that name them.
- reasoning: an answer's reasoning is left out.
- volatile: lines of the system prompt that change with each request; see `_VOLATILE`.
"""
_VOLATILE = re.compile(r"^x-anthropic-billing-header:.*$", re.MULTILINE)
"""Lines that a harness makes anew for each request. Claude Code 2 begins its system prompt with one."""


class Recognised(NamedTuple):
    """A history as the ledger knows it.

    Attributes:
        system: The system prompt.
        messages: The messages.
        used: How often each normaliser was needed.
        node: Where the known beginning ends, or None if not even the opening is known.
        digest: Digest of the whole history.
        continues: Whether the history continues a sampled answer: its last assistant message is one.
    """

    system: str | None
    messages: Messages
    used: Mapping[str, int]
    node: Node | None
    digest: bytes
    continues: bool


def recognise(
    ledger: Ledger,
    system: str | None,
    tools: Sequence[ToolSpec] | None,
    template: str,
    messages: Messages,
    allowed: Collection[str] = NORMALISERS,
) -> Recognised:
    """Replace the messages that a ledger knows in another spelling by its own.

    Args:
        ledger: The ledger.
        system: The system prompt, or None.
        tools: The tools.
        template: The fingerprint of the policy's template.
        messages: The whole history.
        allowed: The normalisers to use.
    """
    used: dict[str, int] = {}
    opening = opening_of(system, tools, template)
    match = ledger.match([opening])
    node: Node | None = match.node if match.known else None
    if node is None and VOLATILE in allowed:
        node = next((each for each in match.root.children if _is_same_opening(each.message, opening)), None)
        if node is not None:
            used[VOLATILE], system = 1, node.message["system"]
    known, renamed = list(messages), dict[str, str]()
    answered = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    continues, new = False, 0
    for i, message in enumerate(messages):
        if node is None:
            break
        if renamed and message["role"] == "user":
            known[i] = message = _with_ids(message, renamed)
        child = node.child(message)
        if child is None and message["role"] == "assistant":
            child, differences = _spelled_otherwise(node, message, tools or (), allowed)
            if child is not None:
                known[i] = plain_copy(child.message)
                renamed.update(zip(_call_ids(message), _call_ids(known[i]), strict=True))
                used.update({name: used.get(name, 0) + 1 for name in differences})
        if child is None:
            break
        node, continues, new = child, (i == answered and bool(child.turns)) or continues, i + 1
    digest = extended(b"", opening) if node is None else node.digest
    for message in known[new:]:
        digest = extended(digest, message)
    return Recognised(system, known, used, node, digest, continues)


def key_of_answer(messages: Sequence[Message]) -> str:
    """Return a key of the last assistant message that every spelling of it has, or "" where there is none."""
    answer = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
    if answer is None:
        return ""
    _, text, calls = _parts(answer)
    return _as_json([text.strip(), [[call["name"], plain_copy(call["input"])] for call in calls]])


def latest_turn(node: Node | None) -> int | None:
    """Return the latest turn that answered at or after a node, or None."""
    stack, turns = [node] if node is not None else [], list[int]()
    while stack:
        each = stack.pop()
        turns += each.turns
        stack += each.children
    return max(turns, default=None)


def _is_same_opening(known: Mapping[str, Any], opening: Mapping[str, Any]) -> bool:
    return {**known, "system": None} == {**opening, "system": None} and _steady(known) == _steady(opening)


def _steady(opening: Mapping[str, Any]) -> str:
    return _VOLATILE.sub("", opening["system"] or "")


def _spelled_otherwise(
    node: Node, message: Message, tools: Sequence[ToolSpec], allowed: Collection[str]
) -> tuple[Node | None, set[str]]:
    """Return the sampled answer after a node that a message spells in another way, and the normalisers for it."""
    for child in node.children:
        differences = _differences(child.message, message, tools) if child.turns else None
        if differences is not None and differences.issubset(allowed):
            return child, differences
    return None, set()


def _differences(known: Mapping[str, Any], message: Message, tools: Sequence[ToolSpec]) -> set[str] | None:
    """Return the normalisers that make two assistant messages equal, or None if none do."""
    (reasoning, text, calls), (own_reasoning, own_text, own_calls) = _parts(known), _parts(message)
    used = set[str]()
    if own_reasoning != reasoning:
        used.add(REASONING if not own_reasoning else BLANKS)
        if own_reasoning and own_reasoning.strip() != reasoning.strip():
            return None
    if own_text != text:
        used.add(BLANKS)
        if own_text.strip() != text.strip():
            return None
    if len(calls) != len(own_calls):
        return None
    for call, own in zip(calls, own_calls, strict=True):
        if call["name"] != own["name"]:
            return None
        if call["toolUseId"] != own["toolUseId"]:
            used.add(IDS)
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
    schemas: list[Any] = [tool["inputSchema"]["json"] for tool in tools if tool["name"] == name]
    declared = schemas[0].get("properties", {}) if schemas and isinstance(schemas[0], dict) else {}
    return all(
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


def _with_ids(message: Message, renamed: Mapping[str, str]) -> Message:
    """Return a message whose results name the ledger's calls."""
    return {"role": message["role"], "content": [_named(block, renamed) for block in message["content"]]}


def _named(block: Any, renamed: Mapping[str, str]) -> Any:
    if "toolResult" not in block:
        return block
    result = block["toolResult"]
    return {"toolResult": {**result, "toolUseId": renamed.get(result["toolUseId"], result["toolUseId"])}}
