"""Run one turn: find its parent, send its request, yield its events, and commit it (law 5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from strands.types.streaming import StreamEvent

from tito_core.backend.errors import BackendError, ContextLengthError, hide_causes
from tito_core.backend.protocol import TokenChunk, TokenResponse
from tito_core.settings import Settings
from tito_core.turn.commit import Recording, lock_wait_s
from tito_core.turn.events import StreamedEvents, events, stop_reason, with_ids
from tito_core.turn.fairness import yield_to_loop
from tito_core.turn.generate import CancelledBySignal, generate_answer, stream_answer
from tito_core.turn.images import answered_texts, keep_texts
from tito_core.turn.inputs import TurnInput
from tito_core.turn.parent import as_shown, match_parent, remember, with_shown_tools
from tito_core.turn.policy_parts import PolicyParts
from tito_core.turn.read import MalformedCallError, check_sampled_ids, read, with_stop
from tito_core.turn.request import how_to_shorten, prepare_turn


async def run_turn(
    policy: PolicyParts, recording: Recording, settings: Settings, turn_input: TurnInput
) -> AsyncGenerator[StreamEvent]:
    """Run one turn and yield its events; `TITOModel.stream` lists what it raises.

    Every check runs before the commit, which is the last step that can fail.
    """
    await yield_to_loop()
    began = asyncio.get_running_loop().time()
    ledger = await recording.begin(turn_input.model_state)
    try:
        turn_input = with_shown_tools(policy, ledger, turn_input)
        match = match_parent(policy, ledger, turn_input, settings)
        prepared = await prepare_turn(policy, ledger, turn_input, settings, match)
        request = prepared.request
        streamed = StreamedEvents(policy.parser, prepared.tail)
        part: TokenChunk | TokenResponse
        if settings.stream:
            generating = stream_answer(policy.backend, request, turn_input.cancel_signal, settings)
            async with aclosing(generating) as parts:
                async for part in parts:
                    for event in streamed.of(part) if isinstance(part, TokenChunk) else ():
                        yield event
            assert isinstance(part, TokenResponse)  # the last part is the whole response
        else:
            part = await generate_answer(policy.backend, request, turn_input.cancel_signal, settings)
        await check_sampled_ids(policy, request, part)
        response = with_stop(policy, request, part)
        await yield_to_loop()
    except CancelledBySignal:
        return  # without messageStop: so Strands recognises a cancelled provider
    except BackendError as error:
        if isinstance(error, ContextLengthError):
            error.advise(how_to_shorten(turn_input.messages, turn_input.system_prompt, turn_input.tool_specs))
        hide_causes(error)
        raise
    with ledger.call_ids.for_turn() as next_call_id:
        agent = recording.agent(ledger, turn_input, match.parent)
        answer = read(policy, prepared, response, next_call_id, settings, agent)
        ledger.check(answer.draft)
        images = request.images
        texts = answered_texts(policy, ledger, answer.draft, prepared.text, images, response.output_ids)
        prompt_ids = request.input_ids
        if images is not None and settings.reports_ids:
            prompt_ids = ledger.path_ids(answer.draft.parent, answer.draft.prompt_ids)
        refused = answer.malformed if settings.malformed_calls == "raise" else ()
        reason = stop_reason(answer.message, response)
        for event in () if refused else events(answer.message, reason, response, answer.arguments, streamed.blocks):
            yield with_ids(event, prompt_ids, response) if settings.reports_ids else event
        # Reached only when the consumer took every event. One that stops early stores no message, and we no turn.
        within_s = lock_wait_s(settings.turn_timeout_s, asyncio.get_running_loop().time() - began)
        new_images = images.new if images else ()
        turn = await recording.commit(
            ledger,
            answer.draft,
            match.history,
            as_shown(answer.message),
            new_images,
            turn_input.caller,
            within_s=within_s,
        )
    keep_texts(policy, ledger, turn, texts)
    remember(turn_input.model_state, ledger, turn.index)
    if refused:
        raise MalformedCallError(refused, turn.index, answer.message)
