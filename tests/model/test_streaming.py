"""Streamed turns: Strands gets text while it is sampled; the ledger and the messages are the same."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent
from strands.types.exceptions import MaxTokensReachedException

from support.aborting import Aborting
from support.histories import add
from support.scripted import BACKENDS, END, Says, call, engine_of, ids_of, model_of, policy_of, with_parts
from tito_conformance.testing import HashPolicy, ScriptedServer
from tito_core import TITOModel, store
from tito_core.ledger import Ledger, check_ledger
from tito_core.parsing.turn import Piece, PreviewError

QWEN3 = "qwen3-tiny"
UUID = "00000000-0000-0000-0000-00000000000a"
HISTORY: Any = [{"role": "user", "content": [{"text": "Go."}]}]
CALL = call("add", '{"a": 1, "b": 2}')


async def events_of(model: TITOModel, **options: Any) -> list[Any]:
    return [event async for event in model.stream(HISTORY, [add.tool_spec], **options)]


def deltas(events: list[Any], kind: str) -> list[str]:
    parts = [event["contentBlockDelta"]["delta"] for event in events if "contentBlockDelta" in event]
    return [d["text"] if kind == "text" else d[kind]["text"] for d in parts if kind in d]


async def test_reasoning_and_text_are_streamed_in_pieces_and_calls_whole() -> None:
    answer = f"<think>\nHm, é🙂 so.\n</think>\n\nLet me add them. {CALL}"
    plain, watched = (
        model_of("vllm", Says(answer, name=QWEN3), QWEN3, stream=stream, ledger=Ledger(UUID))
        for stream in (False, True)
    )
    one, other = await events_of(plain), await events_of(watched)
    for sort in ("text", "reasoningContent"):
        assert "".join(deltas(one, sort)) == "".join(deltas(other, sort))
        assert len(deltas(other, sort)) > 2 > len(deltas(one, sort)) > 0
    assert [event for event in other if "contentBlockDelta" not in event][:-1] == [
        event for event in one if "contentBlockDelta" not in event
    ][:-1]
    kinds = [next(iter(event["contentBlockDelta"]["delta"])) for event in other if "contentBlockDelta" in event]
    assert kinds == sorted(kinds, key=["reasoningContent", "text", "toolUse"].index)
    assert kinds.count("toolUse") == 1


PARTS = st.sampled_from(
    [
        "Hm. ",
        "\n\n",
        " ",
        "é🙂漢",
        "<",
        "<tool",
        "<think>",
        "</think>",
        "\n",
        CALL,
        call("add", "["),
        "<tool_call>",
        "a\n",
    ]
)


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=12, deadline=None)
@given(
    answers=st.lists(st.lists(PARTS, max_size=6).map("".join), min_size=1, max_size=3),
    malformed=st.sampled_from(["feedback", "end_turn"]),
    limit=st.sampled_from([8, 24, 512]),
)
def test_the_ledger_and_the_messages_are_the_same(kind: str, answers: list[str], malformed: Any, limit: int) -> None:
    async def rollout(stream: bool) -> Any:
        script = Says(*answers, "Well.", "Well.", name=QWEN3)
        model = model_of(
            kind,
            script,
            QWEN3,
            stream=stream,
            malformed_calls=malformed,
            sampling={"max_new_tokens": limit},
            ledger=Ledger(UUID),
        )
        agent = Agent(model=model, tools=[add], callback_handler=None)
        ended = []
        for question in ("One?", "Two?", "Three?"):
            try:
                result = await agent.invoke_async(question, limits={"turns": 4})
                ended.append(result.stop_reason)
            except MaxTokensReachedException:
                ended.append("max_tokens")
        check_ledger(model.ledger)
        contents = [(message["role"], message["content"]) for message in agent.messages]
        return store.encode(model.ledger, engine=False), contents, ended, len(model.trajectories)

    assert asyncio.run(rollout(True)) == asyncio.run(rollout(False))


async def test_reasoning_after_text_keeps_its_place_and_the_next_turn_continues() -> None:
    messages = []
    for stream in (False, True):
        model = model_of(
            "sglang", Says("<think>A</think>x<think>B</think>y", "Well.", name=QWEN3), QWEN3, stream=stream
        )
        agent = Agent(model=model, callback_handler=None)
        await agent.invoke_async("One?")
        await agent.invoke_async("Two?")
        assert [turn.parent for turn in model.ledger] == [None, 0]
        messages.append(agent.messages[1]["content"])
    thought = [{"reasoningContent": {"reasoningText": {"text": text}}} for text in "AB"]
    assert messages[0] == messages[1] == [thought[0], {"text": "xy"}, thought[1]]


async def test_a_resumed_turn_shows_the_part_that_could_not_be_streamed() -> None:
    """vLLM reports prompt logprobs only outside a stream, so the first part comes whole and the next ones in pieces."""
    whole = ids_of("Let me see. It is three, I think." + END)
    model = model_of("vllm", Aborting(whole, [4, 3]), stream=True, optional_outputs={"prompt_logprobs": True})
    events = await events_of(model)
    [turn] = model.ledger
    assert "".join(deltas(events, "text")) == "Let me see. It is three, I think."
    assert turn.draft.output_ids.tolist() == whole
    assert turn.draft.extras["prompt_logprobs"].rows == turn.draft.columns.prompt - 1
    assert [(s.start, s.stop) for s in turn.draft.engine.responses] == [(0, 4), (4, 7), (7, len(whole))]


async def test_a_consumer_that_stops_early_leaves_no_trace() -> None:
    answer = f"<think>\nHm.\n</think>\n\nLet me see. {CALL}"
    count = len(await events_of(model_of("sglang", Says(answer, name=QWEN3), QWEN3, stream=True)))
    assert count > 12
    for stop_after in range(count):
        model = model_of("sglang", Says(answer, name=QWEN3), QWEN3, stream=True)
        stream = model.stream(HISTORY, [add.tool_spec])
        for _ in range(stop_after):
            await anext(stream)
        await stream.aclose()
        assert len(model.ledger) == 0, stop_after


def slow(kind: str, **options: Any) -> tuple[Any, Any]:
    policy = policy_of(kind)
    engine = engine_of(kind, HashPolicy(len(policy.tokenizer), eos_ids=[2], eos_weight=1e-9), latency=30.0)
    return engine, policy


@pytest.mark.parametrize("way", ["signal", "task", "closed"])
@pytest.mark.parametrize("kind", BACKENDS)
async def test_cancelling_in_mid_stream_aborts_on_the_engine(kind: str, way: str) -> None:
    engine, policy = slow(kind)
    async with ScriptedServer(engine) as server:
        backend: Any = type(policy.backend)(server.base_url)
        model = replace(policy, backend=backend).model(stream=True, sampling={"max_new_tokens": 100})
        signal, seen = threading.Event(), asyncio.Event()
        stream = model.stream(HISTORY, cancel_signal=signal)

        async def take() -> None:
            async for event in stream:
                if "contentBlockDelta" in event:
                    seen.set()
                    if way == "closed":
                        break

        task = asyncio.create_task(take())
        await seen.wait()
        if way == "signal":
            signal.set()
            await task
        elif way == "task":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
            await stream.aclose()
        for _ in range(300):
            if not engine.running:
                break
            await asyncio.sleep(0.01)
        assert (engine.running, len(model.ledger)) == (0, 0)
        await backend.aclose()


async def test_a_parser_without_a_preview_streams_nothing_before_the_end() -> None:
    class Blind:
        def __init__(self, parser: Any) -> None:
            self.start, self.call_grammar, self.markup = parser.start, parser.call_grammar, parser.markup

    model = model_of("vllm", Says("Let me see."), stream=True)
    model = with_parts(model, parser=Blind(model.policy.parser))
    assert deltas(await events_of(model), "text") == ["Let me see."]


LONG = "Let me see." + "x" * 90
BEGINS = f"{LONG[:80]!r} there"
WRONG: list[tuple[list[Piece], str]] = [
    ([Piece("text", "no")], f"text 'no', .*{BEGINS}"),
    ([Piece("text", "x" * 99)], f"text '{'x' * 80}', "),
    ([Piece("reasoning", "Let")], f"reasoning 'Let', .*{BEGINS}"),
    ([Piece("text", "Let"), Piece("reasoning", "Hm")], f"text 'Let', .*{BEGINS}"),
    ([Piece("text", LONG), Piece("reasoning", "Hm")], "reasoning 'Hm', .*'' there"),
]


@pytest.mark.parametrize(("shown", "words"), WRONG)
async def test_a_turn_with_a_wrong_preview_is_not_committed(shown: list[Piece], words: str) -> None:
    class Wrong:
        def __init__(self, parser: Any) -> None:
            self.start, self.call_grammar, self.markup = parser.start, parser.call_grammar, parser.markup

        def preview(self, tail: Any) -> Any:
            return self

        def feed(self, ids: list[int]) -> list[Piece]:
            shown, self.shown = self.shown, []
            return shown

    model = model_of("vllm", Says(LONG), stream=True)
    parser: Any = Wrong(model.policy.parser)
    parser.shown = shown
    with pytest.raises(PreviewError, match=f"{words}.*stream=False"):
        await events_of(with_parts(model, parser=parser))
    assert len(model.ledger) == 0
