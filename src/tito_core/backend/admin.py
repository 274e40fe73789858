"""What a training loop does to a server, and a rollout never: pause it, load weights, name their version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, Protocol, runtime_checkable

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


class AdminCalls(ABC):
    """The order of the calls, which is the same for every engine."""

    name: ClassVar[str]

    @abstractmethod
    async def pause(self, running: Running = "keep") -> None:
        """See `EngineAdmin.pause`."""

    @abstractmethod
    async def resume(self) -> None:
        """See `EngineAdmin.resume`."""

    @abstractmethod
    async def weight_version(self) -> str | None:
        """See `EngineAdmin.weight_version`."""

    @abstractmethod
    async def _load(self, path: str, version: str) -> None:
        """Load weights into a paused server and name their version."""

    async def load_weights(self, path: str, version: str, *, running: Running = "keep") -> None:
        """See `EngineAdmin.load_weights`."""
        if not version:
            raise ValueError("version must be a name, such as 'step-17': without one nothing tells weights apart.")
        await self.pause(running)
        try:
            await self._load(path, version)
        except BackendError as error:
            raise WeightsNotLoadedError(
                f"{self.name} could not load the weights in {path!r} as {version!r} ({error}). It is left paused, "
                "since it may hold half of them: load good ones with load_weights, which resumes it, or call resume().",
                backend=self.name,
                status=error.status,
                body=error.body,
            ) from error
        await self.resume()
