"""One turn of a model: prepared, generated, shown, and committed once all of its events have been taken (law 5)."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from strands.types.content import Messages
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolSpec

from tito_core import generating, settings, turns
from tito_core.asked import Asked
from tito_core.backend.errors import ContextLengthError, ThrottledError
from tito_core.backend.protocol import TokenChunk, TokenResponse
from tito_core.chat.shape import explained
from tito_core.history import as_shown, remember
from tito_core.malformed import MalformedCallError
from tito_core.policy import Policy
from tito_core.recording import Recording
from tito_core.showing import Showing
from tito_core.turnstile import in_turn
from tito_core.view import events, stop_reason, with_ids


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
    with explained(messages, system, tool_specs, asked.tool_choice, model_state):
        settings.refuse_reserved_name(tool_specs)
    await in_turn()
    try:
        with explained(messages, system, tool_specs, asked.tool_choice, model_state):
            ledger = recording.begin(model_state)
            prepared = turns.prepare(
                policy,
                ledger,
                messages,
                system,
                tool_specs,
                model_state,
                chosen.sampling,
                asked=asked,
                context_limit=chosen.context_limit,
                may_branch=chosen.may_branch,
                keeps_thinking=chosen.keeps_thinking,
                max_total_tokens=chosen.max_total_tokens,
                wanted=chosen.wanted,
                echoes_every_turn=chosen.echoes_every_turn,
            )
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
        response = turns.named(policy, prepared.request, came)
        await in_turn()
    except generating.CancelledBySignal:
        return  # without messageStop, which is how Strands recognises a provider that was cancelled
    except ContextLengthError as error:
        raise ContextWindowOverflowException(str(error)) from error
    except ThrottledError as error:
        raise ModelThrottledException(str(error)) from error
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
