"""The servers behind a router, for what no router does: compare them, and load weights and adapters on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from tito_core.backend.adapters import OTHER_WEIGHTS_NATS, AdapterChecks
from tito_core.backend.errors import AdapterNotInEffectError, BadRequestError
from tito_core.backend.generate import connected, score
from tito_core.backend.protocol import EngineInfo, Running
from tito_core.backend.registry import create_backend
from tito_core.backend.semantics import measure
from tito_core.backend.values import InvalidValueError
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.turn import Adapter

T = TypeVar("T")


class Workers:
    """The servers behind a router, each at its own address; an `EngineAdmin` of all of them. It sends no turns.

    Each call goes to all servers at once. It waits for all of them, and then raises the first error.

    Args:
        backend: Name of the servers' backend.
        addresses: The address of each server.
        **options: Of the backend; see `BackendOptions`.
    """

    def __init__(self, backend: str, addresses: Sequence[str], **options: Any) -> None:
        if not addresses or isinstance(addresses, str):
            raise InvalidValueError(f"addresses must be a list of the workers' addresses, not {addresses!r}.")
        self.name = backend
        self._options = options
        self._servers: dict[str, Any] = {one: create_backend(backend, one, **options) for one in addresses}

    async def check(self, ids: TokenIds, adapter: Adapter | None = None) -> None:
        """Check that all servers are equal: what they report, what their logprobs mean, and their weights.

        Weights are other ones if a quarter of the tokens score more than 0.5 nats apart.

        Args:
            ids: The prompt to measure with, `policy.probe_ids()`, int32, shape (n,).
            adapter: Check too that this adapter is in effect on each server, with the same weights.

        Raises:
            BadRequestError: Two servers differ; the message names both.
            AdapterNotInEffectError: So does the adapter, or a server ignores it.
            BackendError: A server could not be queried.
        """
        found = await self._each(lambda address: self._measured(address, ids, adapter))
        for (one, (info, known)), (other, (further, scores)) in combinations(found.items(), 2):
            for name in (field.name for field in fields(EngineInfo) if field.name != "max_model_len"):
                values = getattr(info, name), getattr(further, name)
                if values[0] != values[1] and None not in values:  # an unknown value agrees with any
                    raise BadRequestError(
                        f"The {self.name} servers differ: {name} is {values[0]!r} at {one} and {values[1]!r} at "
                        f"{other}. Start them with the same settings and weights, or take one from the router.",
                        backend=self.name,
                    )
            apart = float(np.nanquantile(np.abs(scores - known), 0.75))
            if apart > OTHER_WEIGHTS_NATS:
                kind, what = (BadRequestError, "") if adapter is None else (AdapterNotInEffectError, f" for {adapter}")
                raise kind(
                    f"The {self.name} servers at {one} and {other} have other weights{what}: a quarter of {len(ids)} "
                    f"tokens score {apart:.3g} nats apart or more. Load the same folder on both.",
                    backend=self.name,
                )

    async def _measured(self, address: str, ids: TokenIds, adapter: Adapter | None) -> tuple[EngineInfo, Logprobs]:
        server = create_backend(self.name, address, **self._options)  # a new one asks again what the server is
        try:
            if adapter is not None:
                await AdapterChecks().check(server, lambda: ids, adapter)
            return await measure(server, await connected(server), ids), await score(server, ids, adapter=adapter)
        finally:
            await server.aclose()

    async def pause(self, running: Running = "keep") -> None:
        """See `EngineAdmin.pause`."""
        await self._each(lambda address: self._servers[address].pause(running))

    async def resume(self) -> None:
        """See `EngineAdmin.resume`."""
        await self._each(lambda address: self._servers[address].resume())

    async def load_weights(self, path: str, version: str, **options: Any) -> None:
        """See `EngineAdmin.load_weights`. Every server must see the folder; one that fails stays paused."""
        await self._each(lambda address: self._servers[address].load_weights(path, version, **options))

    async def weight_version(self) -> str | None:
        """Return the version that all servers report, or None if they differ."""
        versions = set((await self._each(lambda address: self._servers[address].weight_version())).values())
        return versions.pop() if len(versions) == 1 else None

    async def load_adapter(self, name: str, path: str) -> None:
        """See `EngineAdmin.load_adapter`. After an error, load the adapter under a new name."""
        await self._each(lambda address: self._servers[address].load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        """See `EngineAdmin.unload_adapter`."""
        await self._each(lambda address: self._servers[address].unload_adapter(name))

    async def aclose(self) -> None:
        """Close this event loop's connections to all servers."""
        await self._each(lambda address: self._servers[address].aclose())

    async def _each(self, work: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        outcomes = await asyncio.gather(*map(work, self._servers), return_exceptions=True)
        found: dict[str, T] = {}
        for address, outcome in zip(self._servers, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            found[address] = outcome
        return found
