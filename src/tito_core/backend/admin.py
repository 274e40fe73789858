"""What a training loop does to a server, and a rollout never: pause it, load weights, name their version."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, Protocol, runtime_checkable

from tito_core.backend.errors import BackendError, WeightsNotLoadedError

Running = Literal["keep", "abort"]
"""What becomes of the generations that run when a server is paused: they go on afterwards, or end."""


@runtime_checkable
class EngineAdmin(Protocol):
    """A backend whose server lets its weights be changed. Ours do; a third one need not."""

    async def pause(self, running: Running = "keep") -> None:
        """Hold every generation back until `resume`; new ones wait. What was cached of the weights so far is let go."""

    async def resume(self) -> None:
        """Let generations go on."""

    async def load_weights(self, path: str, version: str, *, running: Running = "keep") -> None:
        """Pause, load the weights in a folder that the server can read, name their version, and resume.

        A generation that went on over the change reports which tokens came from which version (law 10).

        Raises:
            WeightsNotLoadedError: The server could not; it is left paused, so that nothing samples from half of them.
        """

    async def weight_version(self) -> str | None:
        """Give the version that the server names now, or None when it does not say."""


class Pausable(Protocol):
    """The part of `EngineAdmin` that a change of weights needs."""

    @property
    def name(self) -> str:
        """The backend's name."""

    async def pause(self, running: Running = "keep") -> None:
        """See `EngineAdmin.pause`."""

    async def resume(self) -> None:
        """See `EngineAdmin.resume`."""


@asynccontextmanager
async def changing_weights(server: Pausable, path: str, version: str, running: Running) -> AsyncIterator[None]:
    """Pause a server while its weights are loaded, and resume it unless that fails; arguments: see `load_weights`.

    Raises:
        WeightsNotLoadedError: Loading raised a `BackendError`; the server is left paused.
    """
    if not version:
        raise ValueError("version must be a name, such as 'step-17': without one nothing tells weights apart.")
    await server.pause(running)
    try:
        yield
    except BackendError as error:
        raise WeightsNotLoadedError(
            f"{server.name} could not load the weights in {path!r} as {version!r} ({error}). It is left paused, "
            "since it may hold half of them: load good ones with load_weights, which resumes it, or call resume().",
            backend=server.name,
            status=error.status,
            body=error.body,
        ) from error
    await server.resume()
