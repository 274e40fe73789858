"""Sessions of a gateway: each is a ledger with a name, the turns at work in it, and an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from itertools import groupby
from typing import Any

from strands.types.streaming import StreamEvent

from strands_tito.gateway.reply import Refusal
from tito_core.ledger.history import Node
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import REWARD, Annotation, as_reward
from tito_core.policy import PolicyParts
from tito_core.settings import Settings
from tito_core.termination import Termination, record_termination, recorded_termination
from tito_core.turn.recording import Recording

KEPT = 16
"""Answers that a session keeps for a client that lost its connection before it had them whole."""


class RunningTurn:
    """A turn at work, and those who read its events. When the last of them goes away before its end, it is cancelled.

    Args:
        events: The turn; its end is its commit.

    Attributes:
        task: Its task.
        was_read: Whether its answer was written out whole, so that an equal request is another sample.
    """

    def __init__(self, events: AsyncGenerator[StreamEvent]) -> None:
        self._events: list[StreamEvent] = []
        self._changed = asyncio.Event()
        self._readers = 0
        self.was_read = False
        self.task = asyncio.create_task(self._run(events))
        self.task.add_done_callback(self._ended)

    @property
    def failed(self) -> bool:
        """Whether it commits nothing: it was cancelled, or an error ended it."""
        task = self.task
        return task.cancelling() > 0 or (task.done() and (task.cancelled() or task.exception() is not None))

    async def _run(self, events: AsyncGenerator[StreamEvent]) -> None:
        async with aclosing(events):
            async for event in events:
                self._events.append(event)
                self._tell()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # its readers raise it; without any, it is nobody's
        self._events = _joined(self._events)  # readers of the pieces have a list of their own
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def read(self, pause_s: float | None = None) -> AsyncGenerator[StreamEvent | None]:
        """Yield its events from the first one, and return when the turn is committed.

        Args:
            pause_s: Seconds without an event after which None is yielded, again and again.

        Raises:
            Exception: The error that ended it; nothing was committed.
        """
        self._readers += 1
        events, at = self._events, 0
        try:
            while True:
                changed = self._changed
                for event in events[at:]:
                    at += 1
                    yield event
                if self.task.cancelled():
                    raise Refusal("The gateway is stopping.", status=503, code="stopping")
                if self.task.done():
                    self.task.result()
                    return
                try:
                    await asyncio.wait_for(changed.wait(), pause_s)
                except TimeoutError:
                    yield None
        finally:
            self._readers -= 1
            if not self._readers:
                self.task.cancel()


def _joined(events: list[StreamEvent]) -> list[StreamEvent]:
    """Return events with all pieces of a block in one: a stream of thousands is kept for a client's retry."""
    joined: list[Any] = []
    for is_delta, group in groupby(events, lambda event: "contentBlockDelta" in event):
        if not is_delta:
            joined += group
            continue
        deltas: list[Any] = [event["contentBlockDelta"]["delta"] for event in group]
        delta = deltas[0]
        if "text" in delta:
            delta = {"text": "".join([each["text"] for each in deltas])}
        elif "reasoningContent" in delta:
            delta = {"reasoningContent": {"text": "".join([each["reasoningContent"]["text"] for each in deltas])}}
        joined.append({"contentBlockDelta": {"delta": delta}})
    return joined


class Session:
    """One ledger under a name.

    Attributes:
        name: Its name; without any, the ledger's uuid.
        settings: The settings of its turns.
        weight_version: The only weight version that its turns may have, or None for any.
        recording: Its ledger.
        running: Turns at work, and the last ones that ended, by the content of their request.
        used: When it was used last, by `time.monotonic`.
        ignored: Keys of requests that it took without effect.
        keys: Keys of its answers by which a request without a name finds it.
        continued: The answers that such requests continued.
    """

    def __init__(
        self, policy: PolicyParts, name: str, ledger: Ledger, settings: Settings, weight_version: str | None = None
    ) -> None:
        self.name, self.settings, self.weight_version = name or ledger.uuid, settings, weight_version
        self.recording = Recording(policy, ledger)
        self.running: dict[bytes, RunningTurn] = {}
        self.used = time.monotonic()
        self.ignored, self.keys, self.continued = set[str](), set[str](), set[Node]()

    @property
    def ledger(self) -> Ledger:
        """Its ledger."""
        return self.recording.ledger

    @property
    def has_name(self) -> bool:
        """Whether requests name it."""
        return self.name != self.ledger.uuid

    @property
    def termination(self) -> Termination | None:
        """Why it ended, or None while it goes on."""
        return recorded_termination(self.ledger)

    @property
    def is_busy(self) -> bool:
        """Whether a turn is at work."""
        return any(not turn.task.done() for turn in self.running.values())

    def keep(self, request: bytes, turn: RunningTurn) -> None:
        """Keep a turn for requests that are sent again. Of too many, those go first whose answer was read."""
        self.running[request] = turn
        self.running = {digest: each for digest, each in self.running.items() if not each.failed}
        done = [digest for digest, each in self.running.items() if each.task.done()]
        for digest in sorted(done, key=lambda each: not self.running[each].was_read)[:-KEPT]:
            del self.running[digest]

    def end(
        self,
        termination: Termination,
        reward: float | None = None,
        leaf: int | None = None,
        annotations: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a reward and annotations, then why the session ended.

        Args:
            termination: The reason.
            reward: The reward, or None.
            leaf: The turn whose path the reward belongs to. Default: the last turn's, or the whole rollout where it has
                one path.
            annotations: Further annotations of the rollout.

        Raises:
            IndexError, TypeError, ValueError: The reward or an annotation cannot be recorded; nothing is.
        """
        leaves = self.ledger.leaves()
        if leaf is None and len(leaves) > 1:
            leaf = len(self.ledger) - 1
        if leaf is not None and leaf not in leaves:
            raise ValueError(f"leaf={leaf} is not the last turn of a path. Leaves of this session: {leaves}.")
        noted = [Annotation(name, value) for name, value in (annotations or {}).items()]
        if reward is not None:
            noted = [Annotation(REWARD, as_reward(reward), leaf), *noted]
        for each in noted:
            self.ledger.annotate(each.name, each.value, turn=each.turn)
        record_termination(self.ledger, termination)
        self.ledger.seal()
        self.running.clear()
