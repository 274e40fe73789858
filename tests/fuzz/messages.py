"""Hostile Strands messages, tool specifications and tool results, through `TITOModel.stream` on a scripted server.

A turn is committed, keeps the laws and is what the server was asked and said, with no control token out of content; or
it is refused with an error that the package raised itself, or another party's documented one, and the ledger and the
engine are as before. What leaks from below (a KeyError, an AttributeError, a RecursionError, a sentence of Python's
own) is a finding, and so is an error of more than `SENTENCE` characters: nobody reads it.
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
from tito_core.ledger.forest_invariants import check_ledger
from tito_core.ledger.provenance import Provenance

REFUSED = (BackendError, ContextWindowOverflowException, ModelThrottledException, ValueError, TypeError)
NAMES = ("smollm2", "qwen3-tiny")
TURN_S = 10.0
SENTENCE = 4_000
SOURCE = str(Path(tito_core.__file__).parents[1])
"""Where the package's own code is."""

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
    """The class `messages`."""

    def __init__(self, seed: int) -> None:
        self._loop = asyncio.new_event_loop()
        for kind in BACKENDS:
            for name in NAMES:
                model_of(kind, Says("Hi.", name=name), name)

    def case(self, random: Random) -> Outcome:
        """Change a conversation, and let a model take a turn."""
        try:
            return self._loop.run_until_complete(asyncio.wait_for(self._case(random), TURN_S))
        except TimeoutError as error:
            raise Finding(f"a turn did not end within {TURN_S} s") from error

    async def _case(self, random: Random) -> Outcome:
        kind, name = random.choice(BACKENDS), random.choice(NAMES)
        says = Says(f"Adding. {call('add', '{}')}", "Two.", name=name)
        model = model_of(kind, says, name, stream=random.random() < 0.3)
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": [{"text": "Add."}]}], "tool_specs": [ADD]}
        asked |= {"system_prompt": "Be brief."}
        if random.random() < 0.6:  # a turn is committed first
            await taken(model, asked)
        asked["messages"] = conversation(random)
        if random.random() < 0.2:
            asked |= random.choice(
                ({"tool_choice": {"any": {}}}, {"tool_choice": {"tool": {"name": "add"}}}, {"model_state": {}})
            )
        asked = changed(asked, random)
        before, turns = store.encode(model.ledger), len(model.ledger)
        refused: Exception | None = None
        try:
            await taken(model, asked)
        except REFUSED as error:
            expect_clear(error)
            refused = error
        require(model.scripted.running == 0, "a request is left on the engine")  # type: ignore[attr-defined]
        if refused is not None:
            require(store.encode(model.ledger) == before, "a turn that was refused left something in the ledger")
        else:
            require(len(model.ledger) == turns + 1, f"the ledger has {len(model.ledger)} turns, after {turns}")
            expect_sound(model, name)
        turns = len(model.ledger)
        await taken(model, {"messages": [{"role": "user", "content": [{"text": "And now?"}]}]})
        require(len(model.ledger) == turns + 1, "the next turn is not committed")
        return "accepted" if refused is None else "refused"


ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "inputSchema": {"json": {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}}},
}


async def taken(model: TITOModel, asked: dict[str, Any]) -> None:
    """Take every event of a turn."""
    async for _ in model.stream(**asked):
        pass


def conversation(random: Random) -> list[Any]:
    """Make a history with a call or two, their results and reasoning."""
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


def changed(asked: dict[str, Any], random: Random) -> dict[str, Any]:
    """Change up to four places of what a turn is asked with; its own parts stay under their names."""
    while True:
        found = changed_value(asked, random)
        for _ in range(random.randrange(3)):
            found = _with_hostile(found, random)
        if isinstance(found, dict) and "messages" in found and set(found) <= set(asked):
            return found


def _with_hostile(value: Any, random: Random) -> Any:
    """Put a hostile value, or a deep one, in some place; containers on the way are copied."""
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
    """Check that an error is the package's own, and of a length that somebody reads."""
    frames = traceback.extract_tb(error.__traceback__)
    line = frames[-1].line or ""
    mine = frames[-1].filename.startswith(SOURCE) and "raise" in line
    if not mine and not isinstance(error, BackendError | ContextWindowOverflowException | ModelThrottledException):
        raise Finding(f"{type(error).__name__} leaks from {Path(frames[-1].filename).name}") from error
    if len(str(error)) > SENTENCE:
        raise Finding(f"{type(error).__name__} has more than {SENTENCE} characters") from error


def expect_sound(model: TITOModel, name: str) -> None:
    """Check the laws, the request that was sent, and that content made no control token."""
    check_ledger(model.ledger)
    encoded = store.encode(model.ledger)
    require(
        store.encode(store.from_record(store.to_record(model.ledger))) == encoded, "the ledger does not come back equal"
    )
    turn = model.ledger[len(model.ledger) - 1]
    prompt = [*model.ledger.path_ids(turn.parent).tolist(), *turn.draft.prompt_ids.tolist()]
    asked = model.scripted.requests[-1]  # type: ignore[attr-defined]
    require(list(asked.prompt_ids) == prompt, "the ledger has another prompt than was sent")
    control = set(tokenizer(name).all_special_ids)
    content = turn.draft.prompt_ids[turn.draft.prompt_provenance == Provenance.PROMPT].tolist()
    require(not control & set(content), "a control token comes from content")
