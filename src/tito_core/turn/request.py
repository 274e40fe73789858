"""Building a turn's request: what is new is rendered, encoded and checked before it is sent, and kept within bounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
from strands.types.content import Messages
from strands.types.exceptions import MaxTokensReachedException

from tito_core.backend.checked import check_input_ids, clamp_new_tokens
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import TokenRequest
from tito_core.chat.encoder import EncodedText
from tito_core.chat.ending import Opened
from tito_core.chat.least_tokens import LeastTokens
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft
from tito_core.parsing.parsed import CallStatus
from tito_core.settings import Settings
from tito_core.turn.inputs import TurnInput
from tito_core.turn.parent import ParentMatch
from tito_core.turn.policy_parts import PolicyParts


class TotalTokensReachedError(MaxTokensReachedException):
    """`max_total_tokens` leaves no token to sample. Nothing was sent, and the ledger is as before.

    Strands lets it out as it is, like the `MaxTokensReachedException` that ends a turn which the bound has cut short.
    It is no context overflow: a conversation manager that shortened the history would begin another trajectory.
    """


def left_of(max_total_tokens: int | None, prompt_length: int, wanted: int, *, at_least: bool = False) -> int:
    """Return the tokens that may be sampled: at most `wanted`, at most what the bound leaves beside the prompt.

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


PROMPT_TAIL = 32
"""Prompt ids in which a parser looks for a reasoning block that the template opened."""


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """A turn that is ready to send.

    Attributes:
        match: Where it continues the ledger.
        delta: Its own prompt tokens.
        request: The whole prompt and its parameters.
        text: The prompt as it travels.
        tools: The JSON Schema of each tool's arguments, by name.
        tail: The end of the prompt, in which a parser looks for reasoning that the template opened.
        forces_call: Whether a tool has to be called.
    """

    match: ParentMatch
    delta: EncodedText
    request: TokenRequest
    text: IdText
    tools: Mapping[str, Mapping[str, Any]]
    tail: list[int]
    forces_call: bool = False


async def prepare_turn(
    policy: PolicyParts, ledger: Ledger, asked: TurnInput, settings: Settings, match: ParentMatch
) -> Prepared:
    """Build a request, and let the referee see a delta of a new shape (law 7); arguments and errors as `prepare`.

    A long text is encoded in a thread, since it would hold up the event loop for seconds.
    """
    if match.is_long:
        # The thread gets a copy of what it renders: the agent's own list may change meanwhile.
        messages = [*asked.messages[: match.answered], *deepcopy(asked.messages[match.answered :])]
        build = partial(prepare, policy, ledger, replace(asked, messages=messages), settings, match)
        prepared = await asyncio.to_thread(build)
    else:
        prepared = prepare(policy, ledger, asked, settings, match)
    answered, length = (0 if match.parent is None else match.answered), len(prepared.request.input_ids)
    compare = policy.template.comparison(asked.messages, answered, asked.system_prompt, asked.tool_specs, length)
    if compare is not None:
        await asyncio.to_thread(compare)
    return prepared


def prepare(policy: PolicyParts, ledger: Ledger, asked: TurnInput, settings: Settings, match: ParentMatch) -> Prepared:
    """Render what is new after a turn's parent, and check it all before it leaves; any thread may do it.

    Raises:
        InvalidMessageError, TemplateError, UnsupportedContentError: The messages cannot become tokens.
        TotalTokensReachedError: They leave nothing of `max_total_tokens`.
        ContextLengthError: They leave no room to answer.
        UnsupportedToolChoiceError: A tool call is asked for that cannot be forced.
    """
    backend, wanted = policy.backend.name, settings.sampling.max_new_tokens
    total, context = settings.max_total_tokens, settings.context_window_limit
    if match.is_long:
        least = ledger.path_length(match.parent) + least_length(policy, match, asked)
        left = left_of(total, least, wanted, at_least=True)
        clamp_new_tokens(left, least, context, backend=backend, at_least=True)
    delta = _delta(policy, ledger, match, asked)
    check_input_ids(delta.ids, policy.template.encoder.vocab_size, backend=backend)
    input_ids = ledger.path_ids(match.parent, delta.ids)
    left = left_of(total, len(input_ids), wanted)
    room = clamp_new_tokens(left, len(input_ids), context, backend=backend)
    tools = {spec["name"]: spec["inputSchema"]["json"] for spec in asked.tool_specs or ()}
    tail: list[int] = input_ids[-PROMPT_TAIL:].tolist()
    sampling = asked.constraint.sampling(settings.sampling, policy.parser, tools, tail)
    text = policy.prompts.text(ledger, match.parent, delta.ids).for_array(input_ids)
    request = TokenRequest(
        input_ids,
        policy.sampling(sampling).within(room),
        os.urandom(16).hex(),
        ledger.uuid,
        text,
        settings.optional_outputs,
        delta_start=len(input_ids) - len(delta.ids),
        echo=settings.verify_echo == "always" or match.parent is None,
    )
    return Prepared(match, delta, request, text, tools, tail, asked.constraint.forces_call)


def _delta(policy: PolicyParts, ledger: Ledger, match: ParentMatch, asked: TurnInput) -> EncodedText:
    """Render and encode what a turn adds to its parent's tokens."""
    messages, tools = asked.messages, asked.tool_specs
    if match.parent is None:
        return policy.template.first_prompt(messages, asked.system_prompt, tools)
    before = ledger[match.parent].draft
    return policy.template.delta(
        messages[match.answered - 1],
        messages[match.answered :],
        int(before.output_ids[-1]) if len(before.output_ids) else None,
        opened=opened(before),
        tool_specs=tools or (),
        history=messages[: match.answered - 1],
    )


def opened(before: Draft) -> Opened:
    """Return what an answer left open when it was cut off, so that the template's own closers come first."""
    if not before.finish.cut_off and not isinstance(before.stop, str):
        return Opened.MESSAGE
    if not before.reasoning_closed:
        return Opened.REASONING
    cut = before.calls and before.calls[-1].status == CallStatus.TRUNCATED
    return Opened.CALL if cut else Opened.MESSAGE
