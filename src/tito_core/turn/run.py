"""One turn, from its parent to its commit, once all of its events have been taken (law 5)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from strands.types.streaming import StreamEvent

from tito_core.backend.errors import ContextLengthError
from tito_core.backend.protocol import TokenChunk, TokenResponse
from tito_core.settings import Settings
from tito_core.turn import generate
from tito_core.turn.commit import Recording
from tito_core.turn.events import StreamedEvents, events, stop_reason, with_ids
from tito_core.turn.fairness import yield_to_loop
from tito_core.turn.inputs import PolicyParts, TurnInput
from tito_core.turn.limits import how_to_shorten
from tito_core.turn.malformed import MalformedCallError
from tito_core.turn.parent import as_shown, match_parent, remember
from tito_core.turn.read import check_sampled_ids, named, read
from tito_core.turn.request import prepare_turn


async def run_turn(
    policy: PolicyParts, recording: Recording, settings: Settings, asked: TurnInput
) -> AsyncGenerator[StreamEvent]:
    """Run one turn and yield its events; `TITOModel.stream` lists what it raises.

    All that can refuse comes before the commit, which is the last step that can fail.
    """
    await yield_to_loop()
    ledger = recording.begin(asked.model_state)
    try:
        match = match_parent(policy, ledger, asked, settings)
        prepared = await prepare_turn(policy, ledger, asked, settings, match)
        request = prepared.request
        streamed = StreamedEvents(policy.parser, prepared.tail)
        came: TokenChunk | TokenResponse
        if settings.stream:
            generating = generate.streamed(policy.backend, request, asked.cancel_signal, settings)
            async with aclosing(generating) as chunks:
                async for came in chunks:
                    for event in streamed.of(came) if isinstance(came, TokenChunk) else ():
                        yield event
            assert isinstance(came, TokenResponse)  # which comes last
        else:
            came = await generate.whole(policy.backend, request, asked.cancel_signal, settings)
        await check_sampled_ids(policy, request, came)
        response = named(policy, request, came)
        await yield_to_loop()
    except generate.CancelledBySignal:
        return  # without messageStop, which is how Strands recognises a provider that was cancelled
    except ContextLengthError as error:
        error.args = (f"{error} {how_to_shorten(asked.messages, asked.system_prompt, asked.tool_specs)}",)
        raise
    with ledger.call_ids.of_a_turn() as next_call_id:
        answer = read(policy, prepared, response, next_call_id, settings)
        ledger.check(answer.draft)
        text = policy.prompts.answered(ledger, answer.draft, prepared.text, response.output_ids)
        refused = answer.malformed if settings.malformed_calls == "raise" else ()
        reason = stop_reason(answer.message, response)
        for event in () if refused else events(answer.message, reason, response, answer.arguments, streamed.blocks):
            yield with_ids(event, request.input_ids, response) if settings.reports_ids else event
        # Only a consumer that took every event gets here: one that stopped early keeps no message, and we no turn.
        turn = recording.commit(ledger, answer.draft, match.walk, as_shown(answer.message))
    policy.prompts.keep(ledger, turn.index, turn.parent, text)
    remember(asked.model_state, ledger, turn.index)
    if refused:
        raise MalformedCallError(refused, turn.index, answer.message)
