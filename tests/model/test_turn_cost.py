"""The cost of a turn does not grow with its history, except for one comparison of each message (law 14)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest

from support import vision
from support.conversations import LOOK, user
from support.scripted import Says, call, model_of
from tito_core import store
from tito_core.chat import comparison

READ = 3
"""Reads of earlier messages: the last answer is stored as the caller's strings, searched for calls, and shown."""
PIECES = 64
"""Maximum number of pieces of a prompt's text, of which a turn looks for the end in some: two calls each."""


class Message(dict[str, Any]):
    """A message that counts its comparisons and reads; `==` calls a subclass's method first, on either side."""

    seen: ClassVar[Counter[str]] = Counter()

    def __eq__(self, other: object) -> bool:
        Message.seen["compared"] += 1
        return dict.__eq__(other, self)  # a message is only compared with dicts

    __hash__ = None  # as a dict's

    def __getitem__(self, key: str) -> Any:
        Message.seen["read"] += 1
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        Message.seen["read"] += 1
        return super().__iter__()

    def items(self) -> Any:
        Message.seen["read"] += 1
        return super().items()

    def get(self, key: str, default: Any = None) -> Any:
        Message.seen["read"] += 1
        return super().get(key, default)


class Calls:
    """Count the calls that our code makes, of Python and C functions."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        self.count += event in ("call", "c_call") and "/src/tito_" in file and "/testing/" not in file


async def play(model: Any, messages: list[Any], state: dict[str, Any]) -> None:
    """Play one more turn, a question or the results of the last answer's calls, and append its answer."""
    uses = [block["toolUse"]["toolUseId"] for block in (messages or [user("")])[-1]["content"] if "toolUse" in block]
    shown: Any = [
        {"toolUseId": use, "status": "success", "content": [{"text": f"It is {len(messages)}."}]} for use in uses
    ]
    new = {"role": "user", "content": [{"toolResult": result} for result in shown]}
    messages.append(new if uses else user(f"Is {len(messages)} a number?"))
    content: list[Any] = []
    async for event in model.stream(messages, [LOOK], "Be brief.", model_state=state):
        if use := event.get("contentBlockStart", {}).get("start", {}).get("toolUse"):
            content.append({"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"], "input": {"at": "it"}}})
        elif text := event.get("contentBlockDelta", {}).get("delta", {}).get("text"):
            content = [{"text": "".join(block["text"] for block in content) + text}]
    messages.append({"role": "assistant", "content": content})


@pytest.mark.parametrize(("kind", "stream", "lengths"), [("vllm", False, (51, 401)), ("sglang", True, (51, 201))])
async def test_a_turns_cost_does_not_grow_with_its_history(
    kind: str, stream: bool, lengths: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "MAX_COMPARED_TOKENS", 0)  # otherwise short ones are rendered whole
    monkeypatch.setattr(comparison, "TOKENS_PER_COMPARED_TOKEN", 10**9)  # the sample is paid for by new tokens
    with store.LedgerFile(tmp_path / "a.tito", "a") as file:
        script = Says(call("look", '{"at": "it"}'), "Yes, indeed.")
        model = model_of(kind, script, max_model_len=10**6, store=file, stream=stream)
        messages, state, counts = list[Any](), dict[str, Any](), list[int]()
        for turns in lengths:  # the last answer is a call
            while len(messages) < 2 * turns:
                await play(model, messages, state)
            messages[:] = map(Message, messages)
            Message.seen.clear()
            calls = Calls()
            sys.setprofile(calls)
            try:
                await play(model, messages, state)
            finally:
                sys.setprofile(None)
            counts.append(calls.count)
            assert Message.seen == {"compared": 2 * turns, "read": READ}
            messages[:] = map(dict, messages)
    assert len(model.ledger.leaves()) == 1
    assert min(counts) > 500
    assert max(counts) - min(counts) <= 2 * PIECES


IMAGE_CODE = ("turn/images.py", "backend/images.py", "backend/image_validation.py", "chat/images.py")


async def image_calls(model: Any) -> Counter[str]:
    """Count the calls of image code in the second of two turns."""
    messages, state = list[Any](), dict[str, Any]()
    await play(model, messages, state)
    found = Counter[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        found[code.co_qualname] += event == "call" and code.co_filename.endswith(IMAGE_CODE)

    sys.setprofile(note)
    try:
        await play(model, messages, state)
    finally:
        sys.setprofile(None)
    assert len(model.ledger) == 2
    return +found


async def test_a_turn_without_pictures_runs_no_image_code() -> None:
    assert await image_calls(model_of("vllm", Says("Yes, indeed."))) == {}


async def test_a_turn_of_text_with_a_model_that_reads_pictures_runs_no_image_code() -> None:
    policy = await vision.policy_of(vision.VisionEngine())
    assert await image_calls(policy.model()) == {}
