"""Histories by content: which turn of a ledger a history continues (law 8). Never a cursor."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.ledger.ledger import Ledger

STATE_KEY = "tito"
"""Our key in Strands' `model_state`, the agent's own channel: {"ledger": uuid, "turn": index}."""
_DIGEST_SIZE = 16
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,64}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a history continues.

    Attributes:
        parent: The turn that it extends, or None for a new root.
        answered: Number of leading messages that `parent` accounts for; 0 for a root.
        key: Digest of the whole history.
    """

    parent: int | None
    answered: int
    key: bytes


def opening_key(system_prompt: str | None, tool_specs: Sequence[ToolSpec] | None, template: str) -> bytes:
    """Digest what comes before all messages: system prompt, tools, and the template's own fingerprint."""
    return _digest(b"", {"system": system_prompt or None, "tools": list(tool_specs or ()), "template": template})


def extended_key(key: bytes, message: Message) -> bytes:
    """Digest a history with one more message, as Strands hands it to a provider."""
    content: list[Any] = list(message["content"])
    if message["role"] == "assistant":
        content = [_as_shown(block) for block in content] or [{"text": "[blank text]"}]
    return _digest(key, {"role": message["role"], "content": content})


def _as_shown(block: Any) -> Any:
    """Rewrite what Strands stores of an answer as it shows it to a provider (strands/event_loop/streaming.py)."""
    if "toolUse" in block and not _TOOL_NAME.fullmatch(block["toolUse"]["name"]):
        return {"toolUse": {**block["toolUse"], "name": "INVALID_TOOL_NAME"}}
    return block


def find_place(ledger: Ledger, opening: bytes, messages: Messages, state: Mapping[str, Any] | None) -> Place:
    """Find the latest turn that a history continues.

    A turn fits when the history starts with exactly the messages it was committed with, and nothing after them is
    an assistant's (which the engine did not sample in this place). Among several that fit, the agent's own key in
    `state` decides, then the latest commit.
    """
    keys = [opening]
    for message in messages:
        keys.append(extended_key(keys[-1], message))
    for answered in range(len(messages), 0, -1):
        fitting = ledger.matching(keys[answered])
        if fitting:
            return Place(_own(ledger, fitting, state), answered, keys[-1])
        if messages[answered - 1]["role"] == "assistant":
            break
    return Place(None, 0, keys[-1])


def remember(state: dict[str, Any] | None, ledger: Ledger, turn: int) -> None:
    """Keep the agent's own key. Strands writes the state back only when the call succeeds."""
    if state is not None:
        state[STATE_KEY] = {"ledger": ledger.uuid, "turn": turn}


def _own(ledger: Ledger, fitting: Sequence[int], state: Mapping[str, Any] | None) -> int:
    """Choose the agent's own turn, or the one it went back to: the nearest before its last one that fits."""
    key = (state or {}).get(STATE_KEY) or {}
    if key.get("ledger") == ledger.uuid and key.get("turn", len(ledger)) < len(ledger):
        for turn in reversed(ledger.path(key["turn"])):
            if turn.index in fitting:
                return turn.index
    return fitting[-1]


def _digest(key: bytes, value: Any) -> bytes:
    encoded = json.dumps(value, sort_keys=True, ensure_ascii=True, default=_encode)
    return hashlib.blake2b(encoded.encode(), key=key, digest_size=_DIGEST_SIZE).digest()


def _encode(value: Any) -> Any:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)
