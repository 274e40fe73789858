"""Tool results of megabytes: refused before encoding when they cannot fit; the event loop keeps running."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands.types.exceptions import ContextWindowOverflowException

from support.conversations import asked, calls, results
from support.scripted import BACKENDS, Says, model_of, policy_of
from tito_core.backend import ContextLengthError, EngineInfo
from tito_core.chat.word_cache import LONG_TEXT
from tito_core.ledger import Ledger
from tito_core.settings import Settings
from tito_core.turn import request
from tito_core.turn.inputs import TurnInput
from tito_core.turn.parent import match_parent

MEGABYTES = 15_000_000
LINE = "Zeile 17: größer als 日本, 🎉\n"


def result_of(size: int, line: str = LINE) -> list[Any]:
    return [asked("Read it."), *calls(("read", {"path": "log"})), results(line * (size // len(line.encode()) + 1))]


class Refusing:
    """A backend that refuses every request."""

    name = "vllm"

    def __init__(self, info: EngineInfo) -> None:
        self.info = info

    async def connect(self) -> EngineInfo:
        return self.info

    async def generate(self, request: Any, on_chunk: Any = None) -> Any:
        raise ContextLengthError("Too long.", backend=self.name)


async def longest_lag(work: Any) -> float:
    """Await work next to a task that wakes every millisecond; return the task's longest wait in seconds."""
    lags = [0.0]

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            lags.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    await work
    await asyncio.sleep(0.01)
    ticking.cancel()
    return max(lags)


def prepared(policy: Any, messages: Any, chosen: Settings) -> Any:
    ledger, turn_input = Ledger(), TurnInput(messages)
    match = match_parent(policy, ledger, turn_input, chosen)
    return request.prepare(policy, ledger, turn_input, chosen, match)


async def streamed(model: Any, messages: Any) -> None:
    async for _ in model.stream(messages):
        pass


def synchronous_cost(model: Any, messages: Any) -> float:
    """Return the seconds that preparing the turn on the event loop would block it."""
    began = time.perf_counter()
    prepared(model.policy, messages, Settings())
    return time.perf_counter() - began


async def test_the_event_loop_keeps_running_while_a_long_result_is_encoded() -> None:
    model = model_of("vllm", Says("?"))
    info = replace(model.policy.info, max_model_len=None)
    policy = replace(model.policy, backend=Refusing(info), info=info)
    model = policy.model()
    messages = result_of(MEGABYTES // 16)
    alone = synchronous_cost(model, messages)
    with pytest.raises(ContextWindowOverflowException):
        await streamed(model, result_of(2 * LONG_TEXT))  # warm up

    async def again() -> None:
        with pytest.raises(ContextWindowOverflowException):
            await streamed(model, messages)

    assert await longest_lag(again()) < alone / 4
    assert await longest_lag(model.count_tokens(messages[2:])) < alone / 4
    assert len(model.ledger) == 0


async def test_a_result_that_cannot_fit_is_refused_at_once() -> None:
    model = model_of("vllm", Says("?"), max_model_len=131_072)
    messages, part = result_of(MEGABYTES), result_of(MEGABYTES // 15)
    alone = 15 * synchronous_cost(model, part)
    began = time.perf_counter()

    async def refused() -> None:
        with pytest.raises(ContextWindowOverflowException, match=r"at least [0-9]+ tokens .*131072"):
            await streamed(model, messages)

    assert await longest_lag(refused()) < alone / 4
    assert time.perf_counter() - began < alone / 2
    assert (len(model.scripted.requests), len(model.ledger)) == (0, 0)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_long_result_has_the_tokens_of_one_encoding(kind: str) -> None:
    for line in (LINE, "The quick brown fox.   Jumps\n\n  over 13 dogs.\n"):
        model = model_of(kind, Says("Done."), max_model_len=200_000)
        messages = result_of(3 * LONG_TEXT, line)
        await streamed(model, messages)
        [sent] = model.scripted.requests
        rendering, backend = model.policy.template.rendering, model.policy.tokenizer.backend_tokenizer
        whole = backend.encode(str(rendering.of_messages(messages)), add_special_tokens=False)
        assert list(sent.prompt_ids) == whole.ids


async def test_a_history_that_changes_while_it_is_encoded_does_not_change_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("vllm", Says("Done."), max_model_len=200_000)
    messages = result_of(2 * LONG_TEXT)
    expected = list(model.policy.template.first_prompt(messages, None, None).ids)
    prepare = request.prepare

    def later(*arguments: Any, **options: Any) -> Any:
        messages[2]["content"][0]["toolResult"]["content"][0]["text"] = "gone"  # as the agent's loop may
        messages.append(asked("And now?"))
        return prepare(*arguments, **options)

    monkeypatch.setattr(request, "prepare", later)
    await streamed(model, messages)
    assert list(model.scripted.requests[0].prompt_ids) == expected
    assert model.ledger.path_ids(None, model.ledger[0].draft.prompt_ids).tolist() == expected


async def test_turns_that_are_committed_during_an_encoding_stay() -> None:
    model = model_of("vllm", Says("One.", "Two."), max_model_len=200_000)
    long, short = result_of(4 * LONG_TEXT), [asked("Hi?")]
    both = asyncio.gather(streamed(model, long), streamed(model, short))
    await both
    assert [turn.parent for turn in model.ledger] == [None, None]
    assert sorted(len(turn.draft.prompt_ids) > LONG_TEXT // 4 for turn in model.ledger) == [False, True]


async def test_a_turn_that_is_cancelled_during_its_encoding_leaves_nothing() -> None:
    model = model_of("vllm", Says("One.", "Two."), max_model_len=10_000_000)
    task = asyncio.create_task(streamed(model, result_of(10 * LONG_TEXT)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (len(model.scripted.requests), len(model.ledger)) == (0, 0)
    await streamed(model, [asked("Hi?")])
    assert len(model.ledger) == 1


@settings(deadline=None, max_examples=10)
@given(
    line=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20) | st.sampled_from([" ", "x", LINE]),
    spare=st.integers(-2000, 2),
    total=st.booleans(),
)
def test_nothing_that_fits_is_refused_before_it_is_encoded(line: str, spare: int, total: bool) -> None:
    policy = policy_of("vllm")
    messages = result_of(LONG_TEXT, line * 3 + "\n")
    messages[2]["content"][0]["toolResult"]["content"][0]["text"] += "." * LONG_TEXT
    length = len(policy.template.first_prompt(messages, None, None).ids)
    limit = max(1, length + spare)
    bounds = Settings.of(max_total_tokens=limit) if total else Settings.of(context_window_limit=limit)

    def prepare() -> Any:
        return prepared(policy, messages, bounds)

    if length < limit:
        assert len(prepare().request.input_ids) == length
    else:
        with pytest.raises(Exception, match=r"no room|leaves none") as caught:
            prepare()
        assert type(caught.value).__name__ in ("ContextLengthError", "TotalTokensReachedError")
