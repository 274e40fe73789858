"""Idioms of model families: each is certified with its own stops and deltas, or refused.

The expected values come from the plain rendering of transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings

from support.budget import examples
from support.families import TEMPLATE_FAMILIES
from support.talks import LOOK, after, numbers, plain, talks
from tito_core.chat.template import ChatTemplate, TemplateError


@dataclass(frozen=True)
class Expected:
    """The expected result of certifying an idiom.

    Attributes:
        answers: Token that ends the last answer of a conversation.
        calls: Token that ends calls.
        instead: Tokens that replace these if a message follows.
        never_written: Whether the template never writes the token that ends an answer.
        short_ids: Call ids have nine characters.
    """

    answers: str
    calls: str
    candidate: str = "after a question"
    most_calls: int = 3
    instead: dict[str, str] = field(default_factory=dict)
    never_written: bool = False
    short_ids: bool = False

    def talks(self) -> Any:
        chats = talks(most_calls=self.most_calls)
        return chats.map(_with_short_ids) if self.short_ids else chats


def _with_short_ids(messages: Any) -> Any:
    return json.loads(re.sub(r'"call_(\d)"', r'"call0000\1"', json.dumps(messages)))


CERTIFIED = {
    "parts end as questions do": Expected("<|return|>", "<|call|>", most_calls=1, instead={"<|return|>": "<|end|>"}),
    "ignores add_generation_prompt": Expected("<|end|>", "<|end|>"),
    "calls close before the turn": Expected("<SPECIAL_12>", "<SPECIAL_12>"),
    "results within the turn": Expected("<|assistant_end|>", "<|tools_suffix|>"),
    "numbers all results": Expected("<|end|>", "<|end|>", "after messages like the rollout's own"),
    "asks for parts of text": Expected("<|end|>", "<|end|>"),
    "ends by an end that it never writes": Expected(
        "<|eos|>", "<|calls|>", instead={"<|eos|>": "<|end|>"}, never_written=True
    ),
    "ids of nine characters": Expected("<|end|>", "<|end|>", short_ids=True),
}
REFUSED = {
    "ignores add_generation_prompt but for the end": "after the next message",
    "results within a turn that has ended": "<|tools_suffix|>",
    "results before what ends the turn": "does not end this answer with",
}


@cache
def made(name: str) -> tuple[Any, ChatTemplate]:
    tokenizer = TEMPLATE_FAMILIES[name].tokenizer()
    return tokenizer, ChatTemplate.of(tokenizer)


def turns(messages: Any) -> Iterator[tuple[list[Any], Any, list[Any]]]:
    """Yield each assistant message as (messages before it, the message, messages up to the next one)."""
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            later = [i for i in range(k + 1, len(messages)) if messages[i]["role"] == "assistant"]
            yield messages[:k], message, messages[k + 1 : min(later, default=len(messages))]


def test_each_idiom_is_expected_to_be_certified_or_refused() -> None:
    assert set(CERTIFIED) | set(REFUSED) == set(TEMPLATE_FAMILIES)


@pytest.mark.parametrize("name", CERTIFIED)
def test_an_engine_stops_only_at_the_end_of_the_turn(name: str) -> None:
    tokenizer, template = made(name)
    expected = CERTIFIED[name]
    stops = set(tokenizer.convert_tokens_to_ids([expected.answers, expected.calls]))
    assert set(template.stop_ids) == stops
    assert template.closer_id == template.stop_ids[0] == tokenizer.convert_tokens_to_ids(expected.answers)

    @settings(deadline=None, max_examples=examples(25))
    @given(expected.talks())
    def check(messages: Any) -> None:
        for before, answer, _ in turns(messages):
            prompt = plain(tokenizer, before, None, [LOOK])
            text = plain(tokenizer, [*before, answer], None, [LOOK], prompt=False)
            assert text.startswith(prompt)
            has_calls = any("toolUse" in block for block in answer["content"])
            completion = text[len(prompt) :] + (expected.answers if expected.never_written and not has_calls else "")
            ids = tokenizer.encode(completion, add_special_tokens=False)
            at = next(i for i, token in enumerate(ids) if token in stops)
            assert tokenizer.decode(ids[at]) == (expected.calls if has_calls else expected.answers)
            assert numbers(answer)[-1] in tokenizer.decode(ids[:at])
            assert numbers(tokenizer.decode(ids[at:])) == []
            assert stops.isdisjoint(ids[at + 1 :])

    check()


@pytest.mark.parametrize("name", CERTIFIED)
def test_a_delta_equals_the_plain_rendering_and_shows_each_text_once(name: str) -> None:
    tokenizer, template = made(name)
    expected = CERTIFIED[name]
    assert template.certificate.candidate == expected.candidate
    assert template.certificate.tools

    @settings(deadline=None, max_examples=examples(25))
    @given(expected.talks())
    def check(messages: Any) -> None:
        for before, answer, new in turns(messages):
            rest = after(answer, new, plain(tokenizer, [*before, answer, *new], None, [LOOK]))
            ids = tokenizer.encode(rest, add_special_tokens=False)
            has_calls = any("toolUse" in block for block in answer["content"])
            stop = expected.calls if has_calls else expected.answers
            written = tokenizer.convert_tokens_to_ids(expected.instead.get(stop, stop))
            last = tokenizer.convert_tokens_to_ids(stop)
            found = template.delta(answer, new, last, tool_specs=[LOOK], history=before).ids.tolist()
            assert found == ids[ids.index(written) + 1 :]
            results = [block for block in new[0]["content"] if "toolResult" in block]
            results.sort(key=lambda block: block["toolResult"]["toolUseId"])
            texts = [block for message in new for block in message["content"] if "text" in block]
            assert numbers(tokenizer.decode(found)) == numbers([*results, *texts])

    check()


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_with_a_wrong_stop_is_refused(name: str) -> None:
    with pytest.raises(TemplateError) as refused:
        ChatTemplate.of(TEMPLATE_FAMILIES[name].tokenizer())
    assert REFUSED[name] in str(refused.value)
