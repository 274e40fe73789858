"""Watching a model: what Strands showed it, what the engine was sent, and whether the two say the same."""

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
ParsedCallText = tuple[str, str, tuple[str, ...]]
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
    """What one call of the model brought."""

    messages: Any
    system: str
    tools: tuple[str, ...]


@dataclass
class Watched:
    """A model over a scripted engine that remembers what it was shown."""

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
        """The branches, by the turn that each begins with."""
        found = {turn.index: turn.draft.branch for turn in self.model.ledger if turn.draft.branch is not None}
        return {index: (branch.reason.name, branch.turn, branch.message) for index, branch in found.items()}

    def check(self, *, in_order: bool = True) -> list[Trajectory]:
        """Check the laws, that each prompt is its path and its delta, and that the engine read what Strands holds."""
        ledger = self.model.ledger
        check_ledger(ledger)
        requests = {request.request_id: request for request in self.script.requests}
        assert len(requests) == len(ledger), "an engine was asked and its answer is in no turn"
        for turn in ledger:
            sent = list(requests[turn.draft.engine.request_id].prompt_ids)
            assert sent == ledger.path_ids(turn.parent).tolist() + turn.draft.prompt_ids.tolist()
        read = [heard(request.prompt_ids, self.script.name) for request in self.script.requests]
        held = [(shown.system, shown.tools, said(shown.messages)) for shown in self.shown]
        if not in_order:
            read, held = sorted(read, key=lambda talk: repr(talk[1])), sorted(held, key=lambda talk: repr(talk[2]))
        for (opening, messages), (system, tools, expected) in zip(read, held, strict=True):
            assert messages == expected
            assert opening.startswith(system)
            assert [name for name in tools if f'"name": "{name}"' not in opening] == []
        trajectories = self.model.trajectories
        trained = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
        assert trained == sum(0 if turn.draft.constrained else len(turn.draft.output_ids) for turn in ledger)
        return trajectories


def watched(kind: str, *answers: Any, name: str = "smollm2", says: type[Says] = Says, **options: Any) -> Watched:
    """Make a model that gives these answers in turn; `options` are the model's, or a fault, latency, max_model_len."""
    script = says(*answers, name=name)
    model = model_of(kind, script, name, **options)
    whole = Watched(script, model)
    stream = model.stream

    async def spy(messages: Any, tool_specs: Any = None, system_prompt: Any = None, **rest: Any) -> AsyncIterator[Any]:
        shown = Shown(copy.deepcopy(messages), system_prompt or "", tuple(spec["name"] for spec in tool_specs or ()))
        answered = False
        async for event in stream(messages, tool_specs, system_prompt, **rest):
            if not answered:
                whole.shown.append(shown)
                answered = True
            yield event

    model.stream = spy  # type: ignore[method-assign,assignment]
    return whole


def heard(prompt_ids: Sequence[int], name: str) -> tuple[str, list[ParsedCallText]]:
    """Read a ChatML prompt back: the system text, and each message but the one that the policy is about to write."""
    pieces = tokenizer(name).decode(list(prompt_ids)).split("<|im_start|>")[1:]
    turns = [piece.partition("\n")[::2] for piece in pieces]
    assert turns[-1][0] == "assistant"
    system = turns[0][1] if turns[0][0] == "system" else ""
    talk = turns[1:-1] if turns[0][0] == "system" else turns[:-1]
    assert all(body.rstrip("\n").endswith("<|im_end|>") for _, body in talk), talk
    return system, [_heard(role, body.rstrip("\n").removesuffix("<|im_end|>")) for role, body in talk]


def _heard(role: str, body: str) -> ParsedCallText:
    if role == "assistant":
        return _answer(_THOUGHT.sub("", body), [])
    results = tuple(_RESULTS.findall(body))
    return (role, "" if results else body, results)


def said(messages: Any) -> list[ParsedCallText]:
    """Write what Strands holds in the same way; results in the order of their calls, before the text beside them."""
    talk: list[ParsedCallText] = []
    order: list[str] = []
    for message in messages:
        texts = [block["text"] for block in message["content"] if "text" in block]
        if message["role"] == "assistant":
            uses = [block["toolUse"] for block in message["content"] if "toolUse" in block]
            order = [use["toolUseId"] for use in uses]
            talk.append(_answer("\n".join(texts), [_call(use["name"], use["input"]) for use in uses]))
            continue
        results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
        results.sort(key=lambda result: order.index(result["toolUseId"]) if result["toolUseId"] in order else 99)
        if results:
            shown = ("\n".join(_text(item) for item in result["content"]) for result in results)
            talk.append(("user", "", tuple(shown)))
        if texts or not results:
            talk.append(("user", "\n".join(texts), ()))
    return talk


def _answer(text: str, calls: list[str]) -> ParsedCallText:
    found = [json.loads(call) for call in _CALL.findall(text)]
    # Strands holds an answer's text without its outer blanks, and its calls after it.
    spoken = " ".join(_CALL.sub("", text).replace("[blank text]", "").split())
    return ("assistant", spoken, (*(_call(call["name"], call["arguments"]) for call in found), *calls))


def _call(name: str, arguments: Any) -> str:
    shown = name if _TOOL_NAME.fullmatch(name) else "INVALID_TOOL_NAME"
    return f"{shown} {json.dumps(arguments, sort_keys=True)}"


def _text(item: Any) -> str:
    return str(item["text"]) if "text" in item else json.dumps(item["json"], ensure_ascii=False)
