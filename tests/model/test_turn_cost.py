"""What a turn costs does not grow with the messages before it, but for one comparison of each (law 14)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest

from support.conversations import asked
from support.scripted import BACKENDS, Says, model_of
from tito_core import store
from tito_core.chat import comparison

SHORT, LONG = 50, 800
PER_MESSAGE = 4
"""Calls that each message before a turn may cost: its length and its place in the tree, and half of what moves the ids
of its turn into the request."""
READ = 2
"""Reads of earlier messages: the last answer is kept as the caller's own strings, and its calls are looked for."""
NOISE = 300
"""Calls that depend on how many pieces a prompt's text has, at most 64 before they are joined."""


class Message(dict[str, Any]):
    """A message that counts how often it is looked at; Python asks a subclass first, on whichever side it is."""

    seen: ClassVar[Counter[str]] = Counter()

    def __eq__(self, other: object) -> bool:
        Message.seen["compared"] += 1
        return dict.__eq__(other, self)  # type: ignore[arg-type]  # a message is only compared with dicts

    __hash__ = None  # type: ignore[assignment]  # as a dict's

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
    """Counts the calls that our own code makes, of functions in Python and in C."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        self.count += event in ("call", "c_call") and "/src/tito_" in file and "/testing/" not in file


async def play(model: Any, messages: list[Any], state: dict[str, Any]) -> None:
    """Ask once more and keep the answer."""
    messages.append(asked(f"Is {len(messages)} a number?"))
    texts = [
        event["contentBlockDelta"]["delta"]["text"]
        async for event in model.stream(messages, [], "Be brief.", model_state=state)
        if "contentBlockDelta" in event
    ]
    messages.append({"role": "assistant", "content": [{"text": "".join(texts)}]})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_turn_costs_no_more_after_many_messages(
    kind: str, stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "MAX_COMPARED_TOKENS", 0)  # the referee renders short conversations whole
    with store.LedgerFile(tmp_path / "a.tito", "a") as file:
        model = model_of(kind, Says("Yes, indeed."), max_model_len=10**6, store=file, stream=stream)
        messages, state, counts = list[Any](), dict[str, Any](), list[int]()
        for length in (SHORT, LONG):
            while len(messages) < length:
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
            assert Message.seen == {"compared": length, "read": READ}
            messages[:] = map(dict, messages)
    assert len(model.ledger.leaves()) == 1
    assert counts[0] > 500
    assert counts[1] - counts[0] < PER_MESSAGE * (LONG - SHORT) + NOISE
