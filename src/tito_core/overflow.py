"""Histories that do not fit: refused before they are encoded where that is certain, with what to shorten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from strands.types.content import Messages
from strands.types.tools import ToolSpec

from tito_core.chat.least_tokens import LeastTokens
from tito_core.history import Place
from tito_core.policy import Policy


class _Part(NamedTuple):
    """A piece of a prompt: its characters, what it is, and what makes it shorter."""

    characters: int
    what: str
    remedy: str


def least_length(
    policy: Policy, place: Place, messages: Messages, system_prompt: str | None, tool_specs: Sequence[ToolSpec] | None
) -> int:
    """Return a number of tokens that a turn is certain to add to its parent's; 0 where nothing is certain."""
    bound, template, at = LeastTokens.of(policy.tokenizer.backend_tokenizer), policy.template, place.answered
    if bound is None:
        return 0
    if place.parent is None:
        text = template.rendering.of_messages(messages, system_prompt, tool_specs)
    else:
        history = messages[: at - 1]
        text = template.tail(messages[at - 1], messages[at:], tool_specs=tool_specs or (), history=history)
    return max(0, bound.of_text(str.__str__(text)) - 1)  # a delta may lack the opener that was sampled


def how_to_shorten(messages: Messages, system_prompt: str | None, tool_specs: Sequence[Any] | None) -> str:
    """Say which part of a history that does not fit is to be shortened, and how to go on."""
    parts = [
        _Part(len(system_prompt or ""), "the system prompt", "shorten agent.system_prompt"),
        _Part(len(str(list(tool_specs or ()))), "the tool specifications", "give the agent fewer tools"),
        *(part for index, message in enumerate(messages) for part in _parts(message, index)),
    ]
    longest = max(parts, key=lambda part: part.characters)
    total = sum(part.characters for part in parts)
    share = f"{longest.what} ({longest.characters:,} of the prompt's {total:,} characters)"
    if longest.characters * 2 >= total:
        return f"Its longest part, {share}, stays in the agent's history: {longest.remedy}, and call agent() to go on."
    return (
        f"Its longest part is {share}: use a conversation manager, or remove the oldest of the {len(messages)} "
        "messages, up to a question (del agent.messages[:n]), and call agent() to go on."
    )


def _parts(message: Mapping[str, Any], index: int) -> Iterator[_Part]:
    for number, block in enumerate(message["content"]):
        kind = next(iter(block), "empty")
        what = f"the block of kind {kind!r} in message {index} ({message['role']})"
        if len(message["content"]) > 1:
            what = f"{what}, number {number} in its content"
        where = f"agent.messages[{index}]['content'][{number}]"
        match block:
            case {"text": str(text)}:
                yield _Part(len(text), what, f"put a shorter text in its place, {where} = {{'text': '...'}}")
            case {"toolResult": {"content": shown}}:
                size = sum(len(item["text"]) if "text" in item else len(str(item)) for item in shown)
                place = f"{where}['toolResult']['content'] = [{{'text': '...'}}]"
                yield _Part(size, what, f"put a shorter result in its place, {place}")
            case _:
                yield _Part(len(str(block)), what, f"remove the messages from there on, del agent.messages[{index}:]")
