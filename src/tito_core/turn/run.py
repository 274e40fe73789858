"""Run one turn: find its parent, send its request, yield its events, and commit it (law 5).

Preparing a turn and reading its answer take a millisecond or two of CPU each. When many turns are due at once, the
event loop would run all of them before any timer, health check or new connection. So each round of the loop runs the
work of only a few turns, and the loop stays responsive with thousands of rollouts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from strands.types.streaming import StreamEvent

from tito_core.backend.errors import ContextLengthError
from tito_core.backend.protocol import TokenChunk, TokenResponse
from tito_core.settings import Settings
from tito_core.turn import generate
from tito_core.turn.commit import Recording
from tito_core.turn.events import StreamedEvents, events, stop_reason, with_ids
from tito_core.turn.inputs import TurnInput
from tito_core.turn.parent import as_shown, match_parent, remember
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
    ledger = recording.begin(turn_input.model_state)
    try:
        match = match_parent(policy, ledger, turn_input, settings)
        prepared = await prepare_turn(policy, ledger, turn_input, settings, match)
        request = prepared.request
        streamed = StreamedEvents(policy.parser, prepared.tail)
        part: TokenChunk | TokenResponse
        if settings.stream:
            generating = generate.streamed(policy.backend, request, turn_input.cancel_signal, settings)
            async with aclosing(generating) as parts:
                async for part in parts:
                    for event in streamed.of(part) if isinstance(part, TokenChunk) else ():
                        yield event
            assert isinstance(part, TokenResponse)  # the last part is the whole response
        else:
            part = await generate.whole(policy.backend, request, turn_input.cancel_signal, settings)
        await check_sampled_ids(policy, request, part)
        response = with_stop(policy, request, part)
        await yield_to_loop()
    except generate.CancelledBySignal:
        return  # without messageStop: so Strands recognises a cancelled provider
    except ContextLengthError as error:
        error.args = (
            f"{error} {how_to_shorten(turn_input.messages, turn_input.system_prompt, turn_input.tool_specs)}",
        )
        raise
    with ledger.call_ids.for_turn() as next_call_id:
        answer = read(policy, prepared, response, next_call_id, settings)
        ledger.check(answer.draft)
        text = policy.prompts.answered(ledger, answer.draft, prepared.text, response.output_ids)
        refused = answer.malformed if settings.malformed_calls == "raise" else ()
        reason = stop_reason(answer.message, response)
        for event in () if refused else events(answer.message, reason, response, answer.arguments, streamed.blocks):
            yield with_ids(event, request.input_ids, response) if settings.reports_ids else event
        # Reached only when the consumer took every event. One that stops early stores no message, and we no turn.
        turn = recording.commit(ledger, answer.draft, match.history, as_shown(answer.message))
    policy.prompts.keep(ledger, turn.index, turn.parent, text)
    remember(turn_input.model_state, ledger, turn.index)
    if refused:
        raise MalformedCallError(refused, turn.index, answer.message)


ROUND = 8
"""Maximum pieces of work in one round of an event loop. More would delay other tasks; fewer would cost more rounds."""
LONGEST_S = 0.005
"""Time of a round, in seconds, above which later rounds run fewer pieces. It includes the agent's own work around each
piece, such as writing a long history to a trace. A task that sleeps wakes after two or three rounds."""


@dataclass(slots=True)
class _Round:
    """A round of one event loop.

    Attributes:
        began: The loop's time at its start.
        limit: Maximum pieces of work.
        done: Pieces of work so far.
        waiting: Later pieces, first come first served.
    """

    began: float
    limit: int = ROUND
    done: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def end(self, now: float) -> None:
        """Set the next round's limit: the pieces that would have fitted into `LONGEST_S`, or one more than before."""
        took = now - self.began
        if took > LONGEST_S:
            self.limit = max(1, int(self.done * LONGEST_S / took))
        elif self.limit < ROUND:
            self.limit += 1
        self.began, self.done = now, 0


_rounds: dict[asyncio.AbstractEventLoop, _Round] = {}


async def yield_to_loop() -> None:
    """Return in this round of the event loop, or when its limit is reached, in a later one, in order of arrival."""
    loop = asyncio.get_running_loop()
    current = _rounds.get(loop)
    if current is None:
        for closed in [other for other in list(_rounds) if other.is_closed()]:
            _rounds.pop(closed, None)
        current = _rounds[loop] = _Round(loop.time())
        loop.call_soon(_next_round, loop)
    if current.done < current.limit:
        current.done += 1
        return
    future: asyncio.Future[None] = loop.create_future()
    current.waiting.append(future)
    await future


def _next_round(loop: asyncio.AbstractEventLoop) -> None:
    current = _rounds[loop]
    current.end(loop.time())
    while current.waiting and current.done < current.limit:
        future = current.waiting.popleft()
        if not future.done():  # else its turn was cancelled
            future.set_result(None)
            current.done += 1
    if current.done:
        loop.call_soon(_next_round, loop)
    else:
        del _rounds[loop]
