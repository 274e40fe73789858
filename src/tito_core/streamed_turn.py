"""One turn of a model: prepared, generated, shown, and committed once all of its events have been taken (law 5)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import deepcopy
from functools import partial
from typing import Any

from strands.types.content import Messages
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolSpec

from tito_core import generating, settings, turns
from tito_core.asked import Asked
from tito_core.backend.errors import ContextLengthError
from tito_core.backend.protocol import TokenChunk, TokenResponse
from tito_core.found import find
from tito_core.history import as_shown, remember
from tito_core.ledger.ledger import Ledger
from tito_core.malformed import MalformedCallError
from tito_core.overflow import how_to_shorten
from tito_core.policy import Policy
from tito_core.recording import Recording
from tito_core.showing import Showing
from tito_core.turnstile import in_turn
from tito_core.view import events, stop_reason, with_ids
from tito_core.vocabulary import check_sampled_ids


async def one_turn(
    policy: Policy,
    recording: Recording,
    chosen: settings.Settings,
    messages: Messages,
    system: str | None,
    tool_specs: list[ToolSpec] | None,
    asked: Asked,
    model_state: dict[str, Any] | None,
    cancel_signal: threading.Event | None,
) -> AsyncGenerator[StreamEvent]:
    """Run one turn and yield its events; what it raises is told by `TITOModel.stream`."""
    await in_turn()
    ledger = recording.begin(model_state)
    try:
        prepared = await _prepared(policy, ledger, messages, system, tool_specs, asked, model_state, chosen)
        await _compare(policy, prepared, messages, system, tool_specs)
        showing = Showing(policy.parser, prepared.tail)
        came: TokenChunk | TokenResponse
        if chosen.streams:
            async with aclosing(generating.streamed(policy.backend, prepared.request, cancel_signal, chosen)) as coming:
                async for came in coming:
                    for event in showing.events(came) if isinstance(came, TokenChunk) else ():
                        yield event
            assert isinstance(came, TokenResponse)  # which comes last
        else:
            came = await generating.whole(policy.backend, prepared.request, cancel_signal, chosen)
        last_token = policy.template.encoder.vocab_size - 1
        await check_sampled_ids(policy.backend, policy.info, last_token, prepared.request, came)
        response = turns.named(policy, prepared.request, came)
        await in_turn()
    except generating.CancelledBySignal:
        return  # without messageStop, which is how Strands recognises a provider that was cancelled
    except ContextLengthError as error:
        error.args = (f"{error} {how_to_shorten(messages, system, tool_specs)}",)
        raise
    with ledger.call_ids.of_a_turn() as next_call_id:
        runs_calls = chosen.runs_calls or asked.forces_call
        read = turns.read(policy, prepared, response, next_call_id, chosen.malformed_calls, runs_calls)
        ledger.check(read.draft)
        refused = read.malformed if chosen.malformed_calls == "raise" else ()
        reason = stop_reason(read.message, response)
        for event in () if refused else events(read.message, reason, response, read.arguments, showing.blocks):
            yield with_ids(event, prepared.request.input_ids, response) if chosen.reports_ids else event
        # Only a consumer that took every event gets here: one that stopped early keeps no message, and we no turn.
        turn = recording.commit(ledger, read.draft, prepared.place.walk, as_shown(read.message))
        if prepared.request.text is not None:
            policy.prompts.keep(ledger, turn.index, prepared.request.text, response.output_ids)
    remember(model_state, ledger, turn.index)
    if refused:
        raise MalformedCallError(refused, turn.index, read.message)


async def _prepared(
    policy: Policy,
    ledger: Ledger,
    messages: Messages,
    system: str | None,
    tool_specs: list[ToolSpec] | None,
    asked: Asked,
    model_state: dict[str, Any] | None,
    chosen: settings.Settings,
) -> turns.Prepared:
    """Prepare a turn; one with a long new text in a thread, since it would hold up the event loop for seconds."""
    found = find(
        policy,
        ledger,
        messages,
        system,
        tool_specs,
        model_state,
        may_branch=chosen.may_branch,
        keeps=chosen.keeps_thinking,
    )
    prepare = partial(
        turns.prepare,
        policy,
        ledger,
        # The thread gets a copy of what it renders: the agent's own list may change meanwhile.
        [*messages[: found.place.answered], *deepcopy(messages[found.place.answered :])] if found.is_long else messages,
        system,
        tool_specs,
        model_state,
        chosen.sampling,
        asked=asked,
        context_limit=chosen.context_limit,
        may_branch=chosen.may_branch,
        max_total_tokens=chosen.max_total_tokens,
        wanted=chosen.wanted,
        echoes_every_turn=chosen.echoes_every_turn,
        found=found,
    )
    return await asyncio.to_thread(prepare) if found.is_long else prepare()


async def _compare(
    policy: Policy, prepared: turns.Prepared, messages: Messages, system: str | None, tool_specs: list[ToolSpec] | None
) -> None:
    """Let the referee see a delta of a new shape before anything is sent (law 7)."""
    answered = 0 if prepared.place.parent is None else prepared.place.answered
    length = len(prepared.request.input_ids)
    compare = policy.template.comparison(messages, answered, system, tool_specs, length)
    if compare is not None:
        await asyncio.to_thread(compare)
