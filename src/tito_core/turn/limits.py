"""Bounds on a turn's tokens: `max_total_tokens`, and histories that do not fit, with what to shorten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from strands.types.content import Messages
from strands.types.exceptions import MaxTokensReachedException

from tito_core.chat.least_tokens import LeastTokens
from tito_core.turn.inputs import PolicyParts, TurnInput
from tito_core.turn.parent import ParentMatch


class TotalTokensReachedError(MaxTokensReachedException):
    """`max_total_tokens` leaves no token to sample. Nothing was sent, and the ledger is as before.

    Strands lets it out as it is, like the `MaxTokensReachedException` that ends a turn which the bound has cut short.
    It is no context overflow: a conversation manager that shortened the history would begin another trajectory.
    """


def left_of(max_total_tokens: int | None, prompt_length: int, wanted: int, *, at_least: bool = False) -> int:
    """Give the tokens that may be sampled: at most `wanted`, at most what the bound leaves beside the prompt.

    With `at_least` the prompt may have more tokens than `prompt_length`.

    Raises:
        TotalTokensReachedError: It leaves none.
    """
    if max_total_tokens is None:
        return wanted
    if prompt_length >= max_total_tokens:
        has = f"at least {prompt_length}" if at_least else prompt_length
        raise TotalTokensReachedError(
            f"The trajectory has {has} tokens with what came since its last answer, and "
            f"max_total_tokens={max_total_tokens}, which leaves none to sample: end the rollout, or raise the bound."
        )
    return min(wanted, max_total_tokens - prompt_length)


class _Part(NamedTuple):
    """A piece of a prompt: its characters, what it is, and what makes it shorter."""

    characters: int
    what: str
    remedy: str


def least_length(policy: PolicyParts, match: ParentMatch, asked: TurnInput) -> int:
    """Return a number of tokens that a turn is certain to add to its parent's; 0 where nothing is certain."""
    bound, template, at = LeastTokens.of(policy.tokenizer.backend_tokenizer), policy.template, match.answered
    if bound is None:
        return 0
    messages, tools = asked.messages, asked.tool_specs
    if match.parent is None:
        text = template.rendering.of_messages(messages, asked.system_prompt, tools)
    else:
        text = template.tail(messages[at - 1], messages[at:], tool_specs=tools or (), history=messages[: at - 1])
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
