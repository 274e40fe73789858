"""Measure that a LoRA adapter is in effect, before a policy first samples with it.

A server that drops an adapter's name, or serves older weights under it, answers as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from tito_core.backend.errors import AdapterNotInEffectError, BadRequestError
from tito_core.backend.generate import score
from tito_core.backend.protocol import Backend
from tito_core.backend.values import InvalidValueError, short_repr
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.turn import Adapter

_log = logging.getLogger(__name__)
ABOVE_NOISE = 2
"""Scores differ if they do so by more than this many times the difference of two scores by the same weights."""

TRIES = 3
"""How often an adapter is scored while new weights of the model are loaded."""
OTHER_WEIGHTS = 4
"""An adapter has other weights if its scores differ by this many times as much as those of the model alone do."""
OTHER_WEIGHTS_NATS = 0.5
"""And by more than this in a quarter of the tokens, in nats: a bfloat16 logit of 16 to 32 has steps of 0.125."""
MOVED_NATS = 0.1
"""The model alone has other weights if its scores have moved by more than this, in nats, and than noise."""


class _Scored(NamedTuple):
    """The scores of an adapter and of the model alone on one server.

    Attributes:
        own: Those of the adapter.
        plain: Those of the model alone.
        noise: How far scores by the same weights may be apart, in nats.
    """

    own: Logprobs
    plain: Logprobs
    noise: float


class AdapterChecks:
    """The adapters that a policy has measured. Threads and event loops may share it."""

    def __init__(self) -> None:
        self._named: dict[str, Adapter] = {}
        self._scores: dict[Adapter, _Scored] = {}
        self._before: dict[Adapter, _Scored] = {}
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
        self._before = {**self._before, **self._scores}
        self._scores = {}

    async def check(self, backend: Backend, prompt: Callable[[], TokenIds], adapter: Adapter) -> None:
        """Measure an adapter, unless it has been measured. Rollouts that begin meanwhile wait for the same measurement.

        Args:
            backend: The policy's backend.
            prompt: Returns the ids to score, int32, shape (n,).
            adapter: The adapter.

        Raises:
            AdapterNotInEffectError: It scores as the model alone does, or as another adapter, and is not fresh; or the
                server has other weights under its name than before.
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
        found = await _scored(backend, ids, adapter)
        await _renew(backend, ids, known, found)
        # No pause until its own scores are known: of adapters that are measured at once the later sees the others.
        compared = {"the model alone": found.plain, **{f"the adapter {name}": one.own for name, one in known.items()}}
        for name, scores in compared.items():
            if (effect := _apart(found.own, scores)) <= found.noise:
                _refuse_equal(adapter, name, f"{len(ids)} tokens at most {effect:g} nats apart", backend.name)
        if apart := _other_weights(self._before.get(adapter, found), found):
            raise AdapterNotInEffectError(
                f"The {backend.name} server was interrupted, and has other weights under the adapter name {adapter} "
                f"than before: {len(ids)} tokens {apart}. Nothing was committed. Restart the server with the adapter's "
                "own folder, or load that under a new name and collect the rollout again.",
                backend=backend.name,
            )
        known[adapter] = found


async def _scored(server: Backend, ids: TokenIds, adapter: Adapter) -> _Scored:
    again = await score(server, ids)
    for _ in range(TRIES):
        plain = again
        own, again = await score(server, ids, adapter=adapter), await score(server, ids)
        if (moved := _apart(plain, again)) <= OTHER_WEIGHTS_NATS:
            break
    _log.info("adapter=<%s> | its scores differ from the model's by up to %g nats", adapter, _apart(own, plain))
    return _Scored(own, plain, ABOVE_NOISE * moved)


async def _renew(backend: Backend, ids: TokenIds, known: dict[Adapter, _Scored], found: _Scored) -> None:
    """Score known adapters again after the model's weights have changed. Forget those that were unloaded."""
    for adapter, old in list(known.items()):
        if _apart(old.plain, found.plain) <= max(old.noise, found.noise, MOVED_NATS):
            continue
        try:
            known[adapter] = found._replace(own=await score(backend, ids, adapter=adapter))
        except BadRequestError:
            known.pop(adapter, None)


def _other_weights(one: _Scored, other: _Scored) -> str | None:
    """Return how far an adapter's scores are apart if they are of other weights, on the same model; else None."""
    own, plain = (float(np.nanquantile(np.abs(a - b), 0.75)) for a, b in zip(one[:2], other[:2], strict=True))
    if own <= max(OTHER_WEIGHTS_NATS, OTHER_WEIGHTS * plain):
        return None
    return f"score {own:.3g} nats apart or more with it in a quarter of places, and {plain:.3g} without"


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
