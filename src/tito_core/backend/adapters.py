"""Measure that a LoRA adapter is in effect, before a policy first samples with it.

A server that drops an adapter's name, or serves older weights under it, answers as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np

from tito_core.backend.errors import AdapterNotInEffectError
from tito_core.backend.generate import score
from tito_core.backend.protocol import Backend
from tito_core.backend.replicas import servers_of
from tito_core.backend.values import InvalidValueError, short_repr
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.turn import Adapter

_log = logging.getLogger(__name__)
ABOVE_NOISE = 2
"""Scores differ if they do so by more than this many times the difference of two scores by the same weights."""


class AdapterChecks:
    """The adapters that a policy has measured. Threads and event loops may share it."""

    def __init__(self) -> None:
        self._named: dict[str, Adapter] = {}
        self._scores: dict[Adapter, list[Logprobs]] = {}
        self._running: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Adapter, asyncio.Task[None]]] = (
            WeakKeyDictionary()
        )

    def admit(self, adapter: Adapter) -> None:
        """Check an adapter's name before a rollout.

        Raises:
            InvalidValueError: The policy knows the name with another version, whose cached prompts would be found.
        """
        known = self._named.setdefault(adapter.name, adapter)
        if known != adapter:
            raise InvalidValueError(
                f"The adapter name {short_repr(adapter.name)} was used as {known!r} and cannot become {adapter!r}: the "
                "server may find cached prompts by the name. Load each version of its weights under a new name, as "
                "'math-2'."
            )

    def forget(self) -> None:
        """Measure every adapter again, since the server may have been replaced, also those that are being measured."""
        self._scores = {}

    async def check(self, backend: Backend, prompt: Callable[[], TokenIds], adapter: Adapter) -> None:
        """Measure an adapter, unless it has been measured. Rollouts that begin meanwhile wait for the same measurement.

        Args:
            backend: The policy's backend.
            prompt: Returns the ids to score, int32, shape (n,).
            adapter: The adapter.

        Raises:
            AdapterNotInEffectError: It scores as the model alone does, or as another adapter, and is not fresh.
            BackendError: It could not be measured; the next turn tries again.
        """
        if adapter in self._scores:
            return
        loop = asyncio.get_running_loop()
        tasks = self._running.setdefault(loop, {})
        while adapter not in self._scores:
            if adapter not in tasks:
                task = tasks[adapter] = loop.create_task(self._measure(backend, prompt(), adapter))
                task.add_done_callback(lambda done: tasks.pop(adapter) and (done.cancelled() or done.exception()))
            await asyncio.shield(tasks[adapter])

    async def _measure(self, backend: Backend, ids: TokenIds, adapter: Adapter) -> None:
        known = self._scores  # another one after `forget`
        found = [await _scored(server, ids, adapter) for server in servers_of(backend)]
        # No pause until its own scores are known: of adapters that are measured at once the later sees the others.
        others = list(known.items())
        for number, (own, plain, noise) in enumerate(found):
            compared = {"the model alone": plain, **{f"the adapter {name}": each[number] for name, each in others}}
            for name, scores in compared.items():
                if (effect := _apart(own, scores)) <= noise:
                    _refuse_equal(adapter, name, f"{len(ids)} tokens at most {effect:g} nats apart", backend.name)
        known[adapter] = [own for own, *_ in found]


async def _scored(server: Backend, ids: TokenIds, adapter: Adapter) -> tuple[Logprobs, Logprobs, float]:
    """Return the scores of an adapter and of the model alone on one server, and how far equal ones may be apart."""
    plain = await score(server, ids)
    own = await score(server, ids, adapter=adapter)
    _log.info("adapter=<%s> | its scores differ from the model's by up to %g nats", adapter, _apart(own, plain))
    return own, plain, ABOVE_NOISE * _apart(plain, await score(server, ids))


def _refuse_equal(adapter: Adapter, other: str, apart: str, backend: str) -> None:
    problem = f"The adapter {adapter} scores as {other} does on {backend}: {apart}."
    if adapter.fresh:
        _log.warning("%s It is fresh, so it is used.", problem)
        return
    raise AdapterNotInEffectError(
        f"{problem} The server ignores it or serves other weights under its name, or no training step has changed it. "
        f"If none has, pass adapter=Adapter({adapter.name!r}, fresh=True). Else check the adapter's folder, load it "
        "under a new name, and check any gateway.",
        backend=backend,
    )


def _apart(one: Logprobs, other: Logprobs) -> float:
    """Return the largest difference of two scores, in nats; the first has no logprob."""
    return float(np.nanmax(np.abs(one - other)))
