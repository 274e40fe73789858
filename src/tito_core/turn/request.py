"""Build a turn's request: render, encode and check the new messages, and limit the tokens to sample."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import msgspec
from strands.types.content import Messages
from strands.types.exceptions import MaxTokensReachedException
from strands.types.tools import ToolSpec

from tito_core.backend.generate import clamp_new_tokens
from tito_core.backend.images import clamp_for_images
from tito_core.backend.protocol import TokenRequest
from tito_core.chat.comparison import MAX_COMPARED_TOKENS
from tito_core.chat.encoder import EncodedText
from tito_core.chat.ending import Opened, OpenTags
from tito_core.chat.messages import has_images, image_blocks
from tito_core.chat.rendering import TemplateError
from tito_core.ledger.errors import TITOError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft, Image
from tito_core.parsing.completion import CallStatus
from tito_core.parsing.schema import check_tools
from tito_core.policy import PolicyParts
from tito_core.settings import Settings
from tito_core.turn.history import ParentMatch, hash_new
from tito_core.turn.images import read_new_images
from tito_core.turn.inputs import TurnInput
from tito_core.turn.prompt import Prompt

OPEN_TEXT = 64
"""Number of last sampled ids whose text may have begun a closing tag."""
COMPARED_HERE = 16
"""Messages of a conversation that is rendered again in the event loop: half a millisecond, as a thread would take."""
PROMPT_TAIL = 32
"""Number of last prompt ids in which a parser looks for a reasoning block that the template opened."""


class TotalTokensReachedError(TITOError, MaxTokensReachedException):
    """`max_total_tokens` leaves no token to sample. Nothing was sent, and the ledger is unchanged.

    Strands does not wrap it, like the `MaxTokensReachedException` of a turn that the bound has cut off. It is not a
    context overflow: a conversation manager that shortened the history would start another trajectory.
    """


class TrimmedHistoryError(TemplateError):
    """The chat template cannot show a history of which a message is missing, such as its first question."""


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """A turn that is ready to send.

    Attributes:
        match: Where it continues the ledger.
        delta: The prompt tokens that it adds to its parent's.
        prompt: The whole prompt.
        request: The prompt and its parameters.
        tools: The JSON Schema of each tool's arguments, by name.
        prompt_tail: The last prompt ids, in which a parser looks for reasoning that the template opened.
        forced: Names of the tools of which the answer must call one; None if no call is forced.
        takes_json: Whether JSON may take the place of that call: structured output, as some formats write it.
    """

    match: ParentMatch
    delta: EncodedText
    prompt: Prompt
    request: TokenRequest
    tools: Mapping[str, Mapping[str, Any]]
    prompt_tail: list[int]
    forced: tuple[str, ...] | None = None
    takes_json: bool = False


async def prepare_turn(
    policy: PolicyParts, ledger: Ledger, turn_input: TurnInput, settings: Settings, match: ParentMatch
) -> Prepared:
    """Build a request, and compare its delta with the full rendering if that is due (law 7).

    Arguments and errors are those of `prepare`. A long text is encoded in a thread, since it would block the event
    loop for seconds.
    """
    new: tuple[Image, ...] = ()
    shows_images = has_images(turn_input.messages[match.path_messages :])
    if match.is_long or shows_images:
        # The agent's own list may change while other code runs; the ledger knows it as it is now.
        messages = [
            *turn_input.messages[: match.path_messages],
            *deepcopy(turn_input.messages[match.path_messages :]),
        ]
        turn_input = msgspec.structs.replace(turn_input, messages=messages)
    if shows_images:
        blocks = image_blocks(turn_input.messages, match.path_messages)
        new = await read_new_images(policy, blocks, turn_input.messages, match.path_messages)
    try:
        if match.is_long:
            build = partial(prepare, policy, ledger, turn_input, settings, match, new)
            prepared = await asyncio.to_thread(build)
        else:
            prepared = prepare(policy, ledger, turn_input, settings, match, new)
    except TemplateError as error:
        _refuse_trimmed(turn_input.messages, error)
        raise
    compare = _comparison(policy, ledger, turn_input, prepared)
    if compare is not None:  # the turn waits for it: a wrong delta is never sent
        if len(turn_input.messages) <= COMPARED_HERE and len(prepared.prompt.ids) <= MAX_COMPARED_TOKENS:
            compare()
        else:
            await asyncio.to_thread(compare)
    return prepared


def prepare(
    policy: PolicyParts,
    ledger: Ledger,
    turn_input: TurnInput,
    settings: Settings,
    match: ParentMatch,
    new: tuple[Image, ...] = (),
) -> Prepared:
    """Render the messages after a turn's parent, and check the request before it is sent. Any thread may call it.

    `new` are the images of these messages.

    Raises:
        ImageError: The prompt holds another number of placeholders than images.
        InvalidMessageError, TemplateError, UnsupportedContentError: The messages cannot become tokens.
        TotalTokensReachedError: They leave no token of `max_total_tokens`.
        ContextLengthError: They leave no room for an answer.
        ToolSchemaError: A tool's input schema is not JSON, or nests too deep.
        UnsupportedToolChoiceError: The requested tool call cannot be forced.
    """
    hash_new(match, turn_input.messages)
    before = ledger.path_length(match.parent)
    delta = _delta(policy, ledger, match, turn_input)
    limit = tokens_to_sample(settings, before + len(delta.ids), new, backend=policy.backend.name)
    prompt = Prompt.of(policy, ledger, match.parent, delta.ids, new)
    constraint = turn_input.constraint
    schemas = {spec["name"]: spec["inputSchema"]["json"] for spec in turn_input.tool_specs or ()}
    tools = check_tools(constraint.tools(schemas))
    prompt_tail: list[int] = prompt.ids[-PROMPT_TAIL:].tolist()
    sampling = constraint.sampling(settings.sampling, policy.parser, tools, prompt_tail)
    request = TokenRequest(
        prompt.ids,
        policy.sampling(sampling).within(limit),
        os.urandom(16).hex(),
        ledger.uuid,
        prompt.text,
        settings.optional_outputs,
        delta_start=before,
        echo=settings.verify_echo == "always" or match.parent is None or prompt.images is not None,
        images=prompt.images,
        measured=policy.info,
        adapter=settings.adapter,
    )
    takes_json = constraint.output_model is not None
    return Prepared(match, delta, prompt, request, tools, prompt_tail, constraint.forced_tools(tools), takes_json)


def _delta(policy: PolicyParts, ledger: Ledger, match: ParentMatch, turn_input: TurnInput) -> EncodedText:
    """Render and encode what a turn adds to its parent's tokens."""
    messages, tools = turn_input.messages, turn_input.tool_specs
    if match.parent is None:
        return policy.template.first_prompt(messages, turn_input.system_prompt, tools)
    before = ledger[match.parent].draft
    sampled = before.output_ids
    return policy.template.delta(
        messages[match.path_messages - 1],
        messages[match.path_messages :],
        int(sampled[-1]) if len(sampled) else None,
        opened=_open_tags(policy, before, tools) or open_part(before),
        tool_specs=tools or (),
        history=messages[: match.path_messages - 1],
        system_prompt=turn_input.system_prompt,
    )


def _open_tags(policy: PolicyParts, before: Draft, specs: Sequence[ToolSpec] | None) -> OpenTags | None:
    """Return what an answer left open in its calls, where its parser tells; None if a stop token ended it."""
    if before.stop in policy.template.stop_ids or not before.reasoning_closed or not before.calls:
        return None
    sampled: list[int] = before.output_ids.tolist()
    if not sampled or sampled[-1] in policy.template.stop_ids:
        return None
    schemas = {spec["name"]: spec["inputSchema"]["json"] for spec in specs or ()}
    session = policy.parser.start(before.prompt_ids[-PROMPT_TAIL:].tolist(), schemas)
    session.feed(sampled)
    closers = session.finish(truncated=True).unclosed
    return OpenTags(closers, str(policy.tokenizer.decode(sampled[-OPEN_TEXT:]))) if closers else None


def open_part(before: Draft) -> Opened:
    """Return what a cut-off answer left open, so that the template's closers for it come first in the delta."""
    if not before.finish.cut_off and not isinstance(before.stop, str):
        return Opened.MESSAGE
    if not before.reasoning_closed:
        return Opened.REASONING
    cut = before.calls and before.calls[-1].status == CallStatus.TRUNCATED
    return Opened.CALL if cut else Opened.MESSAGE


def tokens_to_sample(settings: Settings, prompt_length: int, new: Sequence[Image], *, backend: str) -> int:
    """Return how many tokens a turn may sample: what its settings and the context leave, with room for new images.

    Args:
        settings: The rollout's settings.
        prompt_length: Tokens of the prompt, in which each new image counts as one token.
        new: The new images.
        backend: Name for errors.

    Raises:
        TotalTokensReachedError: The prompt leaves no token of `max_total_tokens`.
        ContextLengthError: It leaves no room for an answer.
    """
    total, context = settings.max_total_tokens, settings.context_window_limit
    limit = remaining_tokens(total, prompt_length, settings.sampling.max_new_tokens)
    limit = clamp_new_tokens(limit, prompt_length, context, backend=backend)
    if new:
        for bound in (total, context):
            limit = clamp_for_images(new, limit, prompt_length, bound)
    return limit


def remaining_tokens(max_total_tokens: int | None, prompt_length: int, max_new_tokens: int) -> int:
    """Return the number of tokens to sample: at most `max_new_tokens`, at most what `max_total_tokens` leaves.

    Raises:
        TotalTokensReachedError: None are left.
    """
    if max_total_tokens is None:
        return max_new_tokens
    if prompt_length >= max_total_tokens:
        raise TotalTokensReachedError(
            f"The trajectory has {prompt_length} tokens, including the new messages, and "
            f"max_total_tokens={max_total_tokens} leaves none to sample. End the rollout, or raise max_total_tokens."
        )
    return min(max_new_tokens, max_total_tokens - prompt_length)


def _comparison(
    policy: PolicyParts, ledger: Ledger, turn_input: TurnInput, prepared: Prepared
) -> Callable[[], None] | None:
    """Return a function that compares a turn's prompt with the template's own rendering, if a comparison is due."""
    match, length, is_first = prepared.match, len(prepared.prompt.ids), False
    added = length
    if match.parent is not None:
        before = ledger[match.parent].draft
        is_first = before.parent is None
        added += before.columns.output - prepared.request.delta_start
    return policy.template.comparison(
        turn_input.messages,
        match.path_messages,
        turn_input.system_prompt,
        turn_input.tool_specs,
        length,
        added=added,
        first_delta=is_first,
        rendered=prepared.delta.text,
    )


def _refuse_trimmed(messages: Messages, error: TemplateError) -> None:
    """Name the missing message where a template refused a history because of it.

    Raises:
        TrimmedHistoryError: A message is missing.
    """
    missing = _missing(messages)
    if missing is not None:
        raise TrimmedHistoryError(
            f"The agent's history lacks {missing}, as after a conversation manager removed old messages, and the chat "
            f"template cannot show it. ({error}) Keep the first question with "
            "SlidingWindowConversationManager(pin_first=1), or use SummarizingConversationManager, which puts a "
            "summary in its place. Use NullConversationManager to end a rollout when its context is full."
        ) from error


def _missing(messages: Messages) -> str | None:
    """Return what a history lacks: its first question, or the other half of a call and its result; or None."""
    first = messages[0]
    if first["role"] == "assistant" or all("toolResult" in block for block in first["content"]):
        return f"the user's question before message 0 ({first['role']})"
    calls: set[str] = set()
    for index, message in enumerate(messages):
        results = {block["toolResult"]["toolUseId"] for block in message["content"] if "toolResult" in block}
        if results - calls:
            return f"the call of the tool result {min(results - calls)!r} in message {index}"
        if calls - results:
            return f"the result of the tool call {min(calls - results)!r} before message {index}"
        calls = {block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block}
    return None


def how_to_shorten(messages: Messages, system_prompt: str | None, tool_specs: Sequence[Any] | None) -> str:
    """Return the sentence that names the longest part of a history that does not fit, and how to shorten it."""
    parts = [
        _Part(len(system_prompt or ""), "the system prompt", "shorten agent.system_prompt"),
        _Part(len(str(list(tool_specs or ()))), "the tool specifications", "give the agent fewer tools"),
        *(part for index, message in enumerate(messages) for part in _parts(message, index)),
    ]
    longest = max(parts, key=lambda part: part.characters)
    total = sum(part.characters for part in parts)
    share = f"{longest.what} ({longest.characters:,} of the prompt's {total:,} characters)"
    if longest.characters * 2 >= total:
        return (
            f"Its longest part is {share}, and it stays in the agent's history. To continue, {longest.remedy}, and "
            "call agent()."
        )
    return (
        f"Its longest part is {share}. Use a conversation manager; or remove the oldest of the {len(messages)} "
        "messages up to a user message (del agent.messages[:n]), and call agent() to continue."
    )


class _Part(NamedTuple):
    """A part of a prompt: its number of characters, its name, and how to shorten it."""

    characters: int
    what: str
    remedy: str


def _parts(message: Mapping[str, Any], index: int) -> Iterator[_Part]:
    for number, block in enumerate(message["content"]):
        kind = next(iter(block), "empty")
        what = f"the block of kind {kind!r} in message {index} ({message['role']})"
        if len(message["content"]) > 1:
            what = f"{what}, content index {number}"
        where = f"agent.messages[{index}]['content'][{number}]"
        match block:
            case {"text": str(text)}:
                yield _Part(len(text), what, f"replace it by a shorter text ({where} = {{'text': '...'}})")
            case {"toolResult": {"content": shown}}:
                size = sum(len(item["text"]) if "text" in item else _size(item) for item in shown)
                place = f"{where}['toolResult']['content'] = [{{'text': '...'}}]"
                yield _Part(size, what, f"replace it by a shorter result ({place})")
            case _:
                yield _Part(
                    _size(block), what, f"remove that message and the later ones (del agent.messages[{index}:])"
                )


_IMAGE_CHARACTERS = 1024
"""Characters that an image counts as: about those of its usual tokens."""


def _size(block: Any) -> int:
    return _IMAGE_CHARACTERS if "image" in block else len(str(block))
