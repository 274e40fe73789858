"""Run one turn: find its parent, send its request, yield its events, and commit it (law 5)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from strands.types.streaming import StreamEvent

from tito_core.backend.errors import BackendError, ContextLengthError, hide_causes
from tito_core.backend.protocol import TokenChunk, TokenResponse
from tito_core.policy import PolicyParts
from tito_core.settings import Settings
from tito_core.turn.answer import StreamedEvents, check_sampled_ids, events, read_answer, with_stop
from tito_core.turn.generate import CancelledBySignal, generate_answer, stream_answer, within_limits, yield_to_loop
from tito_core.turn.history import match_parent, remember, with_prompt_tools
from tito_core.turn.inputs import TurnInput
from tito_core.turn.recording import Recording, lock_wait_s
from tito_core.turn.request import how_to_shorten, prepare_turn


async def run_turn(
    policy: PolicyParts, recording: Recording, settings: Settings, turn_input: TurnInput, began: float
) -> AsyncGenerator[StreamEvent]:
    """Run one turn and yield its events; `TITOModel.stream` lists what it raises. `began` is of `time.monotonic`.

    Every check runs before the commit, which is the last step that can fail.
    """
    await yield_to_loop()
    ledger, cancel = await recording.begin(turn_input), turn_input.cancel_signal
    try:
        turn_input = with_prompt_tools(policy, ledger, turn_input)
        match = match_parent(policy, ledger, turn_input, settings)
        prepared = await prepare_turn(policy, ledger, turn_input, settings, match)
        request, streamed = prepared.request, StreamedEvents(policy.parser, prepared.prompt_tail)
        if request.adapter is not None:
            check = partial(policy._adapters.check, policy.backend, policy.probe_ids, request.adapter)
            await within_limits(check, policy.backend, request, cancel, settings)
        part: TokenChunk | TokenResponse
        if settings.stream:
            async with aclosing(stream_answer(policy.backend, request, cancel, settings)) as parts:
                async for part in parts:
                    for event in streamed.feed(part) if isinstance(part, TokenChunk) else ():
                        yield event
            assert isinstance(part, TokenResponse)  # the last part is the whole response
        else:
            part = await generate_answer(policy.backend, request, cancel, settings)
        if request.adapter is not None:  # again where the server was replaced meanwhile; the answer is whole by now
            await within_limits(check, policy.backend, request, None, settings)
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
    call_ids: list[str] = []
    try:
        agent = recording.agent(ledger, turn_input, match.parent)
        answer = read_answer(policy, prepared, response, partial(ledger.call_ids.next, call_ids), settings, agent)
        checked = ledger.check(answer.draft)
        path = prepared.prompt.checked_path(policy._prompts, ledger, answer.draft, response.output_ids)
        ids = ledger.path_ids(match.parent, answer.draft.prompt_ids) if settings.reports_ids else None
        for event in events(answer, response, began, streamed.blocks, ids):
            yield event
        # Reached only when the consumer took every event. One that stops early stores no message, and we no turn.
        within_s = lock_wait_s(settings.turn_timeout_s, time.monotonic() - began)
        images, caller = prepared.prompt.new_images, turn_input.caller
        turn = await recording.commit(ledger, checked, match.history, answer.stored, images, caller, within_s=within_s)
    except BaseException:
        ledger.call_ids.give_back(call_ids)
        raise
    policy._prompts.keep(ledger, turn.index, turn.parent, path)
    remember(turn_input.model_state, ledger, turn.index)
    if (refusal := answer.refusal(turn.index)) is not None:
        raise refusal
