"""Calls forced by a grammar on a real engine, each held to what was asked for."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from strands.types.tools import ToolSpec

from tito_core import Policy
from tito_core.ledger import Finish, Provenance, check_ledger
from tito_core.ledger.turn import Turn

_SHORT = "^[a-z0-9 ]{0,16}$"
SCHEMAS: dict[str, dict[str, Any]] = {
    "calculate": {
        "type": "object",
        "properties": {"expression": {"type": "string", "pattern": _SHORT}},
        "required": ["expression"],
        "additionalProperties": False,
    },
    "look": {
        "type": "object",
        "properties": {
            "at": {"type": "string", "pattern": _SHORT},
            "far": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"type": "string", "enum": ["red", "dark blue", "<tool_call>"]},
            "deep": {
                "type": "object",
                "properties": {"all": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
                "required": ["all"],
                "additionalProperties": False,
            },
        },
        "required": ["at", "far", "kind"],
        "additionalProperties": False,
    },
    "stop": {
        "type": "object",
        "properties": {"sure": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
        "additionalProperties": False,
    },
}
"""No value is long and no argument is undeclared: a policy of random weights would write on until the token limit.
Patterns of plain characters stay in the grammar; a `maxLength` does not, as XGrammar then allows no escapes."""
SPECS: list[ToolSpec] = [
    {"name": name, "description": f"{name} something", "inputSchema": {"json": schema}}
    for name, schema in SCHEMAS.items()
]
SETTINGS: Any = [{"any": {}}, *({"tool": {"name": name}} for name in SCHEMAS)]
QUESTIONS = ("What is 2 + 3?", "Where is the owl?", "Say <tool_call> and </tool_call>.", "Stop.")


@dataclass
class Outcome:
    """The outcomes of many forced calls.

    Attributes:
        found: How many were right, were cut off by the token limit, or were wrong.
        tools: How many called which tool.
        faults: What was wrong, each with the answer's text.
    """

    found: Counter[str] = field(default_factory=Counter)
    tools: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        found = ", ".join(f"{number} {what}" for what, number in self.found.most_common())
        return f"{self.found['right']} right of {self.found.total()} forced calls ({found}), {self.tokens} tokens"


async def force(policy: Policy, calls: int, seed: int, *, at_once: int = 16, **sampling: Any) -> Outcome:
    """Force calls of any tool and of each, and hold every answer to the choice and to the tool's schema."""
    outcome, slots, chance = Outcome(), asyncio.Semaphore(at_once), random.Random(seed)

    async def one(number: int) -> None:
        choice, question = SETTINGS[number % len(SETTINGS)], chance.choice(QUESTIONS)
        settings = {"temperature": 1.0, "max_new_tokens": 300, "seed": chance.randrange(2**31), **sampling}
        async with slots:
            model = policy.model(sampling=settings)
            messages: Any = [{"role": "user", "content": [{"text": f"{question} ({number})"}]}]
            events = [event async for event in model.stream(messages, SPECS, tool_choice=choice)]
        check_ledger(model.ledger)
        [turn] = model.ledger
        outcome.tokens += len(turn.draft.output_ids)
        uses = [event["contentBlockStart"]["start"] for event in events if "contentBlockStart" in event]
        fault = _fault(choice, turn, [use["toolUse"]["name"] for use in uses if "toolUse" in use], events)
        marks = set(model.trajectory.provenance[-len(turn.draft.output_ids) :].tolist())
        if marks != {Provenance.CONSTRAINED}:
            fault = f"its tokens are marked {marks}"
        if turn.draft.finish == Finish.LENGTH:
            outcome.found["cut off"] += 1
        else:
            outcome.found["wrong" if fault else "right"] += 1
        if fault:
            text = policy.tokenizer.decode(turn.draft.output_ids)
            outcome.faults.append(f"{choice}: {fault} {turn.draft.finish} {text!r}")
        else:
            outcome.tools.update(call.name or "" for call in turn.draft.calls)

    await asyncio.gather(*map(one, range(calls)))
    return outcome


def _fault(choice: Any, turn: Turn, uses: list[str], events: list[Any]) -> str:
    """Return what is wrong with an answer, or nothing if it is one valid call of what was forced."""
    if turn.draft.finish == Finish.LENGTH:
        return "it was cut off"
    if [call.status for call in turn.draft.calls] != ["ok"]:
        return f"its calls are {turn.draft.calls}"
    [call] = turn.draft.calls
    wanted = [choice["tool"]["name"]] if "tool" in choice else list(SCHEMAS)
    if call.name not in wanted or uses != [call.name]:
        return f"it calls {call.name}, Strands reads {uses}"
    texts = [event["contentBlockDelta"]["delta"] for event in events if "contentBlockDelta" in event]
    if [list(text) for text in texts] != [["toolUse"]]:
        return f"there is more than the call: {texts}"
    try:
        jsonschema.validate(json.loads(_one_a_character(texts[0]["toolUse"]["input"])), SCHEMAS[call.name])
    except (ValueError, jsonschema.ValidationError) as error:
        return f"its arguments are not as the schema has them: {error.args[0]}"
    return ""


def _one_a_character(text: str) -> str:
    """Return the text with one U+FFFD for each character of several bytes that is not Unicode.

    xgrammar counts such a character once, by its first byte (F5 and above begin four bytes), and lets the policy
    write it; Python decodes it to one U+FFFD a byte, so that a string of `maxLength` characters would seem longer.
    """
    return re.sub("\N{REPLACEMENT CHARACTER}{2,4}", "\N{REPLACEMENT CHARACTER}", text)
