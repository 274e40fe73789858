"""One turn, from its parent to its commit, once all of its events have been taken (law 5).

Preparing a turn and reading its answer take a millisecond or two of CPU. When many are due at once, an event loop would
do all of them before it looks at anything else, such as a timer, a health check or a new connection. So a turn does its
work in rounds of the loop, a few turns a round: with thousands of rollouts the loop stays responsive.
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
from tito_core.turn.read import MalformedCallError, check_sampled_ids, named, read
from tito_core.turn.request import how_to_shorten, prepare_turn


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
    with ledger.call_ids.for_turn() as next_call_id:
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


ROUND = 8
"""Most pieces of work in one round of an event loop: more would hold others up, fewer would cost a round's own work
each."""
LONGEST_S = 0.005
"""How long a round may take before later ones do fewer pieces: with each goes what its agent does before and after it,
such as to write a long history for a trace. Whoever sleeps is up after two or three rounds."""


@dataclass(slots=True)
class _Round:
    began: float
    most: int = ROUND
    gone: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def end(self, now: float) -> None:
        """Let the next one do as many pieces as would have fitted into this one's time, or one more."""
        took = now - self.began
        if took > LONGEST_S:
            self.most = max(1, int(self.gone * LONGEST_S / took))
        elif self.most < ROUND:
            self.most += 1
        self.began, self.gone = now, 0


_rounds: dict[asyncio.AbstractEventLoop, _Round] = {}


async def yield_to_loop() -> None:
    """Wait for a round of the event loop in which few others work: this one, or a later one in the order of coming."""
    loop = asyncio.get_running_loop()
    present = _rounds.get(loop)
    if present is None:
        for ended in [other for other in list(_rounds) if other.is_closed()]:
            _rounds.pop(ended, None)
        present = _rounds[loop] = _Round(loop.time())
        loop.call_soon(_next, loop)
    if present.gone < present.most:
        present.gone += 1
        return
    future: asyncio.Future[None] = loop.create_future()
    present.waiting.append(future)
    await future


def _next(loop: asyncio.AbstractEventLoop) -> None:
    present = _rounds[loop]
    present.end(loop.time())
    while present.waiting and present.gone < present.most:
        future = present.waiting.popleft()
        if not future.done():  # else who waited was cancelled
            future.set_result(None)
            present.gone += 1
    if present.gone:
        loop.call_soon(_next, loop)
    else:
        del _rounds[loop]
