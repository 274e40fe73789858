"""Long tool results: encoded in a thread, while the event loop keeps running; refused if they cannot fit."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands.types.exceptions import ContextWindowOverflowException

from support.conversations import calls, results, user
from support.scripted import Says, model_of, policy_of
from tito_core.backend import ContextLengthError
from tito_core.chat.encoder import LONG_TEXT, ContentSafeEncoder
from tito_core.ledger import Ledger
from tito_core.settings import Settings
from tito_core.turn import request
from tito_core.turn.history import match_parent
from tito_core.turn.inputs import TurnInput
from tito_core.turn.request import TotalTokensReachedError, how_to_shorten

LINE = "Zeile 17: größer als 日本, 🎉\n"


def result_of(size: int, line: str = LINE) -> list[Any]:
    return [user("Read it."), *calls(("read", {"path": "log"})), results(line * (size // len(line.encode()) + 1))]


def beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let each long encoding wait for the running event loop, and return their lengths. On the loop it would fail."""
    loop, encoded, lengths = asyncio.get_running_loop(), ContentSafeEncoder._encoded, list[int]()

    def waits(encoder: ContentSafeEncoder, stretch: str) -> Any:
        if len(stretch) >= LONG_TEXT:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
            lengths.append(len(stretch))
        return encoded(encoder, stretch)

    monkeypatch.setattr(ContentSafeEncoder, "_encoded", waits)
    return lengths


def prepared(policy: Any, messages: Any, chosen: Settings) -> Any:
    ledger, turn_input = Ledger(), TurnInput(messages)
    match = match_parent(policy, ledger, turn_input, chosen)
    return request.prepare(policy, ledger, turn_input, chosen, match)


async def streamed(model: Any, messages: Any) -> None:
    async for _ in model.stream(messages):
        pass


async def test_the_event_loop_keeps_running_while_a_long_result_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("vllm", Says("?"), max_model_len=1000)
    messages, lengths = result_of(2 * LONG_TEXT), beside_the_loop(monkeypatch)
    with pytest.raises(ContextWindowOverflowException, match=r"has [0-9]+ tokens .*1000"):
        await streamed(model, messages)
    assert len(lengths) == 1
    await model.count_tokens(messages[2:])
    assert len(lengths) == 2
    assert (len(model.scripted.requests), len(model.ledger)) == (0, 0)


async def test_a_long_result_has_the_tokens_of_one_encoding() -> None:
    for line in (LINE, "The quick brown fox.   Jumps\n\n  over 13 dogs.\n"):
        model = model_of("vllm", Says("Done."), max_model_len=200_000)
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
        messages.append(user("And now?"))
        return prepare(*arguments, **options)

    monkeypatch.setattr(request, "prepare", later)
    await streamed(model, messages)
    assert list(model.scripted.requests[0].prompt_ids) == expected
    assert model.ledger.path_ids(None, model.ledger[0].draft.prompt_ids).tolist() == expected


async def test_turns_that_are_committed_during_an_encoding_stay() -> None:
    model = model_of("vllm", Says("One.", "Two."), max_model_len=200_000)
    long, short = result_of(4 * LONG_TEXT), [user("Hi?")]
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
    await streamed(model, [user("Hi?")])
    assert len(model.ledger) == 1


@settings(deadline=None, max_examples=10)
@given(
    line=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20) | st.sampled_from([" ", "x", LINE]),
    spare=st.integers(-2000, 2),
    total=st.booleans(),
)
def test_a_long_prompt_is_refused_only_if_it_does_not_fit(line: str, spare: int, total: bool) -> None:
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


@pytest.mark.parametrize("bound", ["context_window_limit", "max_total_tokens"])
@pytest.mark.parametrize("long", [True, False])
def test_the_error_for_a_prompt_that_does_not_fit_has_its_length(bound: str, long: bool) -> None:
    policy = policy_of("vllm")
    messages = result_of(2 * LONG_TEXT) if long else [user("word " * 90)]
    length = len(policy.template.first_prompt(messages, None, None).ids)
    with pytest.raises((ContextLengthError, TotalTokensReachedError)) as caught:
        prepared(policy, messages, Settings.of(**{bound: 60}))
    assert isinstance(caught.value, ContextLengthError) == (bound == "context_window_limit")
    assert re.findall(r"has (\d+) tokens", str(caught.value)) == [str(length)]
    assert "60" in str(caught.value)


def block_of(kind: str, size: int) -> Any:
    return {
        "text": {"text": "x" * size},
        "image": {"image": {"format": "png", "source": {"bytes": b"x" * size}}},
        "toolUse": {"toolUse": {"toolUseId": "c", "name": "read", "input": {"path": "x" * size}}},
        "toolResult": {
            "toolResult": {
                "toolUseId": "c",
                "status": "success",
                "content": [{"text": "x" * size}, {"json": {"a": 1}}, {"image": {"format": "png"}}],
            }
        },
    }[kind]


IMAGE = 1024
"""An image counts as so many characters, whatever its bytes."""
STATEMENT = re.compile(r"\(((?:del )?agent\.messages.*)\), and call")


@settings(max_examples=40)
@given(st.lists(st.integers(1, 5_000), min_size=5, max_size=5), st.sampled_from([None, *range(5)]))
def test_the_longest_part_is_named_with_its_share_and_a_remedy_that_shortens_it(
    sizes: list[int], longest: int | None
) -> None:
    if longest is not None:
        sizes[longest] += 40_000
    system, spec, text, call, result = sizes
    specs = [{"name": "x" * spec}]
    messages: list[Any] = [
        {"role": "user", "content": [block_of("text", text), block_of("image", 99_999)]},
        {"role": "assistant", "content": [block_of("toolUse", call)]},
        {"role": "user", "content": [block_of("toolResult", result)]},
    ]
    parts = {
        "the system prompt": system,
        "the tool specifications": len(str(specs)),
        "the block of kind 'text' in message 0 (user), content index 0": text,
        "the block of kind 'image' in message 0 (user), content index 1": IMAGE,
        "the block of kind 'toolUse' in message 1 (assistant)": len(str(block_of("toolUse", call))),
        "the block of kind 'toolResult' in message 2 (user)": result + len(str({"json": {"a": 1}})) + IMAGE,
    }
    most, total = max(parts, key=lambda name: parts[name]), sum(parts.values())
    advice = how_to_shorten(messages, "x" * system, specs)
    assert f"{most} ({parts[most]:,} of the prompt's {total:,} characters)" in advice
    if parts[most] * 2 < total:
        assert "del agent.messages[:n]" in advice
    elif most == "the system prompt":
        assert "shorten agent.system_prompt" in advice
    elif most == "the tool specifications":
        assert "fewer tools" in advice
    else:
        [statement] = STATEMENT.findall(advice)
        exec(statement, {"agent": SimpleNamespace(messages=messages)})  # as a user would type it
        assert most not in how_to_shorten(messages, "x" * system, specs)


def test_a_history_without_prompt_or_tools_can_be_shortened() -> None:
    messages: list[Any] = [{"role": "user", "content": [{}]}, user("Why?")]
    assert "the block of kind 'text' in message 1 (user) (4 of the prompt's 8 characters)" in how_to_shorten(
        messages, None, None
    )
    assert "the system prompt (2 of the prompt's 6 characters)" in how_to_shorten([user("Hi")], "Hi", None), "the first"
