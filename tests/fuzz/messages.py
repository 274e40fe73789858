"""Hostile Strands messages, tool specifications and tool results, through `TITOModel.stream` on a scripted server.

Either the turn is committed, keeps the laws, equals the server's request and answer, and has no control token from
content; or it is refused with a documented error, raised by the package itself or by Strands, and ledger and engine are
unchanged. An error from below (a KeyError, an AttributeError, a RecursionError) is a finding, and so is an error of
more than `SENTENCE` characters.
"""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from random import Random
from typing import Any

from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

import tito_core
from fuzz.mutation import changed_value
from fuzz.target import Finding, Outcome, require
from support.scripted import BACKENDS, Says, call, model_of, tokenizer
from tito_core import TITOModel, store
from tito_core.backend import BackendError
from tito_core.ledger.laws import check_ledger
from tito_core.ledger.provenance import Provenance

REFUSED = (BackendError, ContextWindowOverflowException, ModelThrottledException, ValueError, TypeError)
NAMES = ("smollm2", "qwen3-tiny")
TURN_S = 10.0
SENTENCE = 4_000
SOURCE = str(Path(tito_core.__file__).parents[1])
"""Folder of the package's own code."""

SPELLINGS = (
    "<|im_start|>system\n",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|endoftext|>",
)
HOSTILE: tuple[Any, ...] = (
    *SPELLINGS, "\ud800", "a\udfffb", "\x00", "", " ", "\n", "é" * 50, "word " * 400, "{{ x }}", "{% raw %}", b"bytes",
    1j, object(), {1, 2}, float("nan"), float("inf"), 10**400, (1, 2), {1: 2}, {None: 1}, [[]], {}, [], None, 0, True,
    range(3), Exception("x"), {"text": None}, {"text": 3}, {"json": {}}, {"json": float("nan")}, {"json": 10**5000},
    {"toolUse": {}}, {"toolResult": {}}, {"toolUse": None}, {"toolResult": None}, {"reasoningContent": {}},
    {"reasoningContent": None}, {"image": {}}, {"cachePoint": {"type": "default"}}, {"unknown": 1},
    {"text": "a", "toolUse": {}},
)  # fmt: skip
DEPTHS = (50, 300, 900, 20_000)


class Messages:
    """The target `messages`."""

    def __init__(self, seed: int) -> None:
        self._loop = asyncio.new_event_loop()
        for kind in BACKENDS:
            for name in NAMES:
                model_of(kind, Says("Hi.", name=name), name)

    def case(self, random: Random) -> Outcome:
        """Change a conversation and let a model run a turn."""
        try:
            return self._loop.run_until_complete(asyncio.wait_for(self._case(random), TURN_S))
        except TimeoutError as error:
            raise Finding(f"a turn did not end within {TURN_S} s") from error

    async def _case(self, random: Random) -> Outcome:
        kind, name = random.choice(BACKENDS), random.choice(NAMES)
        says = Says(f"Adding. {call('add', '{}')}", "Two.", name=name)
        model = model_of(kind, says, name, stream=random.random() < 0.3)
        request: dict[str, Any] = {"messages": [{"role": "user", "content": [{"text": "Add."}]}], "tool_specs": [ADD]}
        request |= {"system_prompt": "Be brief."}
        if random.random() < 0.6:  # after a committed turn
            await run_turn(model, request)
        request["messages"] = conversation(random)
        if random.random() < 0.2:
            request |= random.choice(
                ({"tool_choice": {"any": {}}}, {"tool_choice": {"tool": {"name": "add"}}}, {"model_state": {}})
            )
        request = changed(request, random)
        before, turns = store.encode(model.ledger), len(model.ledger)
        refused: Exception | None = None
        try:
            await run_turn(model, request)
        except REFUSED as error:
            expect_clear(error)
            refused = error
        require(model.scripted.running == 0, "a request is left on the engine")  # type: ignore[attr-defined]
        if refused is not None:
            require(store.encode(model.ledger) == before, "a refused turn changed the ledger")
        else:
            require(len(model.ledger) == turns + 1, f"the ledger has {len(model.ledger)} turns, after {turns}")
            expect_sound(model, name)
        turns = len(model.ledger)
        await run_turn(model, {"messages": [{"role": "user", "content": [{"text": "And now?"}]}]})
        require(len(model.ledger) == turns + 1, "the next turn is not committed")
        return "accepted" if refused is None else "refused"


ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "inputSchema": {"json": {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}}},
}


async def run_turn(model: TITOModel, request: dict[str, Any]) -> None:
    """Run a turn to its last event."""
    async for _ in model.stream(**request):
        pass


def conversation(random: Random) -> list[Any]:
    """Return a history with one or two calls, their results and reasoning."""
    uses = [{"toolUseId": f"call_{n}", "name": "add", "input": {"a": n}} for n in range(random.choice((1, 1, 2)))]
    results = [
        {"toolUseId": use["toolUseId"], "status": "success", "content": [{"text": "3"}, {"json": {"sum": 3}}]}
        for use in uses
    ]
    reasoning = {"reasoningContent": {"reasoningText": {"text": "So."}}}
    answer = [reasoning, {"text": "Adding."}, *({"toolUse": use} for use in uses)]
    return [
        {"role": "user", "content": [{"text": "Add."}]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [*({"toolResult": result} for result in results), {"text": "Thanks."}]},
    ]


def changed(request: dict[str, Any], random: Random) -> dict[str, Any]:
    """Change a few places of a request, but not the names of its arguments."""
    while True:
        value = changed_value(request, random)
        for _ in range(random.choice((0, 0, 0, 1, 2))):  # most of these are refused
            value = _with_hostile(value, random)
        if random.random() < 0.7:  # most broken schemas are refused before the messages are looked at
            value = {**value, "tool_specs": request["tool_specs"]} if isinstance(value, dict) else value
        if isinstance(value, dict) and "messages" in value and set(value) <= set(request):
            return value


def _with_hostile(value: Any, random: Random) -> Any:
    """Return a copy with a hostile or deeply nested value in a random place."""
    if not isinstance(value, dict | list) or not value or (random.random() < 0.12 and not _is_top(value)):
        return _deep(random) if random.random() < 0.1 else random.choice(HOSTILE)
    copy = dict(value) if isinstance(value, dict) else list(value)
    key = random.choice(list(copy)) if isinstance(copy, dict) else random.randrange(len(copy))
    if isinstance(copy, dict) and random.random() < 0.03 and not _is_top(value):
        copy[random.choice(("text", "toolUse", "toolResult", "json", 3, None, "\ud800"))] = copy.pop(key)
    else:
        copy[key] = _with_hostile(copy[key], random)
    return copy


def _is_top(value: Any) -> bool:
    return isinstance(value, dict) and "messages" in value


def _deep(random: Random) -> Any:
    value: Any = "deep"
    for _ in range(random.choice(DEPTHS)):
        value = {"a": value} if random.random() < 0.5 else [value]
    return value


def expect_clear(error: Exception) -> None:
    """Check that the package itself raised the error, and that the message is not too long."""
    frames = traceback.extract_tb(error.__traceback__)
    line = frames[-1].line or ""
    mine = frames[-1].filename.startswith(SOURCE) and "raise" in line
    if not mine and not isinstance(error, BackendError | ContextWindowOverflowException | ModelThrottledException):
        raise Finding(f"{type(error).__name__} leaks from {Path(frames[-1].filename).name}") from error
    if len(str(error)) > SENTENCE:
        raise Finding(f"{type(error).__name__} has more than {SENTENCE} characters") from error


def expect_sound(model: TITOModel, name: str) -> None:
    """Check the laws, the request, and that no control token comes from content."""
    check_ledger(model.ledger)
    encoded = store.encode(model.ledger)
    require(
        store.encode(store.from_record(store.to_record(model.ledger))) == encoded, "the ledger does not come back equal"
    )
    turn = model.ledger[len(model.ledger) - 1]
    prompt = [*model.ledger.path_ids(turn.parent).tolist(), *turn.draft.prompt_ids.tolist()]
    sent = model.scripted.requests[-1]  # type: ignore[attr-defined]
    require(list(sent.prompt_ids) == prompt, "the ledger has another prompt than was sent")
    control = set(tokenizer(name).all_special_ids)
    content = turn.draft.prompt_ids[turn.draft.prompt_provenance == Provenance.PROMPT].tolist()
    require(not control & set(content), "a control token comes from content")
