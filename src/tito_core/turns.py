"""One turn, aside from the ledger: prepare a request, read its answer into a draft; commit nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.asked import Asked
from tito_core.backend.protocol import TokenRequest, TokenResponse
from tito_core.backend.request_checks import check_input_ids, clamp_new_tokens
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.wanted import NOTHING_WANTED, Wanted
from tito_core.budget import left_of
from tito_core.chat.encoder import EncodedText
from tito_core.chat.ending import Opened
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.found import Found, find
from tito_core.history import Place, as_shown
from tito_core.ledger.columns import Columns
from tito_core.ledger.histories import extended
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import CallRecord, Draft, EngineRecord, Finish
from tito_core.malformed import MalformedCalls, malformed_of
from tito_core.overflow import least_length
from tito_core.parsing.parsed import CallStatus, ParsedCall, ParsedTurn
from tito_core.policy import Policy
from tito_core.view import assistant_message, sampled_arguments

PROMPT_TAIL = 32
"""Prompt ids in which a parser looks for a reasoning block that the template opened."""


class Prepared(msgspec.Struct, frozen=True, eq=False):
    """A turn that is ready to send.

    Attributes:
        place: Where it continues the ledger.
        delta: Its own prompt tokens.
        request: The whole prompt and its parameters.
        tools: The JSON Schema of each tool's arguments, by name.
        tail: The end of the prompt, in which a parser looks for reasoning that the template opened.
    """

    place: Place
    delta: EncodedText
    request: TokenRequest
    tools: Mapping[str, Mapping[str, Any]]
    tail: list[int]


def prepare(
    policy: Policy,
    ledger: Ledger,
    messages: Messages,
    system_prompt: str | None,
    tool_specs: Sequence[ToolSpec] | None,
    state: Mapping[str, Any] | None,
    sampling: SamplingParams,
    *,
    asked: Asked = Asked(),  # noqa: B008  # frozen
    context_limit: int | None,
    may_branch: bool,
    keeps_thinking: bool = True,
    max_total_tokens: int | None = None,
    wanted: Wanted = NOTHING_WANTED,
    echoes_every_turn: bool = True,
    found: Found | None = None,
) -> Prepared:
    """Find where a history continues, render what is new, and check it all before it leaves.

    With `found`, the place that `find` gave for the same history, it may run in any thread.

    Raises:
        HistoryChangedError: The agent's history changed, and `may_branch` is False.
        InvalidMessageError, TemplateError, UnsupportedContentError: The messages cannot become tokens.
        TotalTokensReachedError: They leave nothing of `max_total_tokens`.
        ContextLengthError: They leave no room to answer.
        UnsupportedToolChoiceError: A tool call is asked for that cannot be forced.
    """
    if found is None:
        found = find(
            policy, ledger, messages, system_prompt, tool_specs, state, may_branch=may_branch, keeps=keeps_thinking
        )
    place = found.place
    if found.is_long:
        least = ledger.path_length(place.parent) + least_length(policy, place, messages, system_prompt, tool_specs)
        left = left_of(max_total_tokens, least, sampling.max_new_tokens, at_least=True)
        clamp_new_tokens(left, least, context_limit, backend=policy.backend.name, at_least=True)
    delta = _delta(policy, ledger, place, messages, system_prompt, tool_specs)
    check_input_ids(delta.ids, policy.template.encoder.vocab_size, backend=policy.backend.name)
    input_ids = ledger.path_ids(place.parent, delta.ids)
    left = left_of(max_total_tokens, len(input_ids), sampling.max_new_tokens)
    room = clamp_new_tokens(left, len(input_ids), context_limit, backend=policy.backend.name)
    tools = {spec["name"]: spec["inputSchema"]["json"] for spec in tool_specs or ()}
    tail: list[int] = input_ids[-PROMPT_TAIL:].tolist()
    shaped = asked.sampling(sampling, policy.parser, tools, tail)
    request = TokenRequest(
        input_ids,
        policy.sampling(shaped).within(room),
        os.urandom(16).hex(),
        ledger.uuid,
        policy.prompts.text(ledger, place.parent, delta.ids).standing_for(input_ids),
        wanted,
        delta_start=len(input_ids) - len(delta.ids),
        echo=echoes_every_turn or place.parent is None,
    )
    return Prepared(place, delta, request, tools, tail)


def _delta(
    policy: Policy,
    ledger: Ledger,
    place: Place,
    messages: Messages,
    system_prompt: str | None,
    tool_specs: Sequence[ToolSpec] | None,
) -> EncodedText:
    """Render and encode what a turn adds to its parent's tokens."""
    if place.parent is None:
        return policy.template.first_prompt(messages, system_prompt, tool_specs)
    before = ledger[place.parent].draft
    return policy.template.delta(
        messages[place.answered - 1],
        messages[place.answered :],
        int(before.output_ids[-1]) if len(before.output_ids) else None,
        opened=opened(before),
        tool_specs=tool_specs or (),
        history=messages[: place.answered - 1],
    )


def opened(before: Draft) -> Opened:
    """Tell what an answer left open when it was cut off, so that the template's own closers come first."""
    if not before.finish.cut_off and not isinstance(before.stop, str):
        return Opened.MESSAGE
    if not before.reasoning_closed:
        return Opened.REASONING
    cut = before.calls and before.calls[-1].status == CallStatus.TRUNCATED
    return Opened.CALL if cut else Opened.MESSAGE


def named(policy: Policy, request: TokenRequest, response: TokenResponse) -> TokenResponse:
    """Name the stop string that ended an answer, where the server does not: the first that its text completes.

    vLLM up to 0.31 does not. An answer that holds none was ended by its last token, of which the model alone knew.
    """
    if response.finish != Finish.STOP or response.stop is not None:
        return response
    text = str(policy.tokenizer.decode(response.output_ids.tolist()))
    ends = {text.find(stop) + len(stop): stop for stop in request.sampling.stop if stop in text}
    return replace(response, stop=ends[min(ends)] if ends else int(response.output_ids[-1]))


def parse(policy: Policy, prepared: Prepared, response: TokenResponse) -> ParsedTurn:
    """Read reasoning, text and calls out of the sampled ids; a call of the reserved name is malformed."""
    session = policy.parser.start(prepared.tail, prepared.tools)
    session.feed(response.output_ids.tolist())
    parsed = session.finish(truncated=response.finish.cut_off)
    if all(call.name != MALFORMED_CALL for call in parsed.calls):
        return parsed
    return replace(parsed, calls=tuple(map(_not_reserved, parsed.calls)))


def _not_reserved(call: ParsedCall) -> ParsedCall:
    if call.status != CallStatus.OK or call.name != MALFORMED_CALL:
        return call
    reason = f"{MALFORMED_CALL} is no tool."
    return replace(call, status=CallStatus.MALFORMED, arguments=None, arguments_text=None, reason=reason)


def draft(policy: Policy, prepared: Prepared, response: TokenResponse, message: Message, parsed: ParsedTurn) -> Draft:
    """Put one answered turn together, ready to commit."""
    request, place = prepared.request, prepared.place
    recorded = policy.terms.recorded(request.sampling, policy.backend.name, policy.info)
    return Draft(
        parent=place.parent,
        columns=Columns.pack(prepared.delta.ids, prepared.delta.provenance, response.output_ids, response.logprobs),
        constrained=request.sampling.grammar is not None,
        prompt_length=response.prompt_length,
        finish=response.finish,
        stop=response.stop,
        fingerprint=extended(place.walk.digest, as_shown(message)),
        max_new_tokens=request.sampling.max_new_tokens,
        sampling=recorded.sampling,
        reasoning_closed=parsed.reasoning_closed,
        branch=place.branch,
        calls=tuple(CallRecord(c.name, str(c.status), c.start, c.stop, c.reason) for c in parsed.calls),
        engine=EngineRecord(
            server=recorded.server,
            request_id=response.request_id,
            latency_s=response.latency_s,
            cached_tokens=response.cached_tokens,
            versions=response.versions,
            responses=response.responses,
        ),
        extras=response.columns,
    )


class Read(msgspec.Struct, frozen=True, eq=False):
    """An answer, read.

    Attributes:
        message: What Strands will store.
        draft: The turn, ready to commit.
        malformed: Its malformed calls.
        arguments: The arguments of its calls as the policy wrote them, by `toolUseId`.
    """

    message: Message
    draft: Draft
    malformed: tuple[ParsedCall, ...]
    arguments: Mapping[str, str]


def read(
    policy: Policy,
    prepared: Prepared,
    response: TokenResponse,
    next_call_id: Callable[[], str],
    malformed_calls: MalformedCalls = "feedback",
    runs_calls: bool = True,
) -> Read:
    """Turn an answer into the message that Strands will store and the draft of the turn."""
    parsed = parse(policy, prepared, response)
    message = assistant_message(parsed, response.finish, next_call_id, malformed_calls, runs_calls)
    drafted = draft(policy, prepared, response, message, parsed)
    return Read(message, drafted, malformed_of(parsed), sampled_arguments(message, parsed))
