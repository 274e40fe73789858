"""Observe a model: compare the messages that Strands passed with the prompts that the engine got."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from strands import Agent, tool

from support.scripted import Says, model_of, tokenizer
from tito_core import TITOModel
from tito_core.ledger import Trajectory, check_ledger

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_RESULTS = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_\-]{1,64}")

Branch = tuple[str, int | None, int | None]
"""A branch as tests write it: its reason, turn and message."""
PlainMessage = tuple[str, str, tuple[str, ...]]
"""A message: role, text, and its calls (name and input as JSON) or results."""


@tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


@dataclass(frozen=True)
class Shown:
    """The arguments of one model call."""

    messages: Any
    system: str
    tools: tuple[str, ...]


@dataclass
class ObservedRollout:
    """A model over a scripted engine, with the arguments of its calls."""

    script: Says
    model: TITOModel
    shown: list[Shown] = field(default_factory=list)

    def agent(self, **options: Any) -> Agent:
        settings = {"tools": [add], "system_prompt": "Be brief.", "callback_handler": None, **options}
        return Agent(model=self.model, **settings)

    @property
    def parents(self) -> list[int | None]:
        return [turn.parent for turn in self.model.ledger]

    @property
    def branches(self) -> dict[int, Branch]:
        """The branches, by their first turn."""
        branches = {turn.index: turn.draft.branch for turn in self.model.ledger if turn.draft.branch is not None}
        return {index: (branch.reason.name, branch.turn, branch.message) for index, branch in branches.items()}

    def check(self, *, in_order: bool = True, injected: str | None = None) -> list[Trajectory]:
        """Check the laws, that each prompt is its path and delta, and that it holds Strands' messages.

        Text that matches `injected`, which Strands shows in one call only and a path keeps, is left out on both sides.
        """
        ledger = self.model.ledger
        check_ledger(ledger)
        requests = {request.request_id: request for request in self.script.requests}
        assert len(requests) == len(ledger), "a request has no turn"
        for turn in ledger:
            sent = list(requests[turn.draft.engine.request_id].prompt_ids)
            assert sent == ledger.path_ids(turn.parent).tolist() + turn.draft.prompt_ids.tolist()
        read = [read_prompt(request.prompt_ids, self.script.name) for request in self.script.requests]
        held = [(shown.system, shown.tools, stored_messages(shown.messages)) for shown in self.shown]
        if injected is not None:
            read = [(opening, without(injected, messages)) for opening, messages in read]
            held = [(system, tools, without(injected, messages)) for system, tools, messages in held]
        if not in_order:
            read.sort(key=lambda prompt: repr(prompt[1]))
            held.sort(key=lambda arguments: repr(arguments[2]))
        for (opening, messages), (system, tools, expected) in zip(read, held, strict=True):
            assert messages == expected
            assert opening.startswith(system)
            assert [name for name in tools if f'"name": "{name}"' not in opening] == []
        trajectories = self.model.trajectories
        trained = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
        assert trained == sum(0 if turn.draft.constrained else len(turn.draft.output_ids) for turn in ledger)
        return trajectories


def observe(
    kind: str, *answers: Any, name: str = "smollm2", says: type[Says] = Says, **options: Any
) -> ObservedRollout:
    """Make a model with these answers; `options` are the model's, or `fault`, `latency`, `max_model_len`."""
    script = says(*answers, name=name)
    model = model_of(kind, script, name, **options)
    rollout = ObservedRollout(script, model)
    stream = model.stream

    async def spy(messages: Any, tool_specs: Any = None, system_prompt: Any = None, **rest: Any) -> AsyncIterator[Any]:
        shown = Shown(copy.deepcopy(messages), system_prompt or "", tuple(spec["name"] for spec in tool_specs or ()))
        answered = False
        async for event in stream(messages, tool_specs, system_prompt, **rest):
            if not answered:
                rollout.shown.append(shown)
                answered = True
            yield event

    model.stream = spy  # type: ignore[method-assign,assignment]
    return rollout


def read_prompt(prompt_ids: Sequence[int], name: str) -> tuple[str, list[PlainMessage]]:
    """Parse a ChatML prompt: the system text, and the messages before the next answer."""
    pieces = tokenizer(name).decode(list(prompt_ids)).split("<|im_start|>")[1:]
    turns = [piece.partition("\n")[::2] for piece in pieces]
    assert turns[-1][0] == "assistant"
    system = turns[0][1] if turns[0][0] == "system" else ""
    messages = turns[1:-1] if turns[0][0] == "system" else turns[:-1]
    assert all(body.rstrip("\n").endswith("<|im_end|>") for _, body in messages), messages
    return system, [_read_message(role, body.rstrip("\n").removesuffix("<|im_end|>")) for role, body in messages]


def _read_message(role: str, body: str) -> PlainMessage:
    if role == "assistant":
        return _answer(_THOUGHT.sub("", body), [])
    results = tuple(_RESULTS.findall(body))
    return (role, "" if results else body, results)


def without(pattern: str, messages: list[PlainMessage]) -> list[PlainMessage]:
    """Return messages with text that matches a pattern left out, and a user's message that holds nothing else."""
    kept = [(role, re.sub(pattern, "", text, flags=re.DOTALL), parts) for role, text, parts in messages]
    return [message for message in kept if message[0] == "assistant" or message[1] or message[2]]


def stored_messages(messages: Any) -> list[PlainMessage]:
    """Return Strands' messages in the same form: results in the order of their calls, before the message's text."""
    plain_messages: list[PlainMessage] = []
    order: list[str] = []
    for message in messages:
        texts = [block["text"] for block in message["content"] if "text" in block]
        if message["role"] == "assistant":
            uses = [block["toolUse"] for block in message["content"] if "toolUse" in block]
            order = [use["toolUseId"] for use in uses]
            plain_messages.append(_answer("\n".join(texts), [_call(use["name"], use["input"]) for use in uses]))
            continue
        results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
        results.sort(key=lambda result: order.index(result["toolUseId"]) if result["toolUseId"] in order else 99)
        if results:
            shown = ("\n".join(_text(item) for item in result["content"]) for result in results)
            plain_messages.append(("user", "", tuple(shown)))
        if texts or not results:
            plain_messages.append(("user", "\n".join(texts), ()))
    return plain_messages


def _answer(text: str, calls: list[str]) -> PlainMessage:
    parsed = [json.loads(call) for call in _CALL.findall(text)]
    # Strands stores an answer's text stripped, and its calls after the text.
    plain_text = " ".join(_CALL.sub("", text).replace("[blank text]", "").split())
    return ("assistant", plain_text, (*(_call(call["name"], call["arguments"]) for call in parsed), *calls))


def _call(name: str, arguments: Any) -> str:
    shown = name if _TOOL_NAME.fullmatch(name) else "INVALID_TOOL_NAME"
    return f"{shown} {json.dumps(arguments, sort_keys=True)}"


def _text(item: Any) -> str:
    return str(item["text"]) if "text" in item else json.dumps(item["json"], ensure_ascii=False)
