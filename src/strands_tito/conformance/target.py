"""The server under test: its backend, between a recorder of raw responses and the log of its wire."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from strands_tito.conformance import recorder, wire_reading
from strands_tito.conformance.recorder import Recorder
from strands_tito.conformance.wire_log import TransportFactory, WireLog
from strands_tito.conformance.wire_reading import Heard
from strands_tito.testing.wire import WireKit, find_wire, installed_wires
from tito_core.backend.http.address import Address
from tito_core.backend.http.connections import ConnectionPool
from tito_core.backend.protocol import Backend
from tito_core.backend.registry import ENTRY_POINT_GROUP, create_backend
from tito_core.model import Policy


@dataclass(frozen=True)
class Target:
    """What is tested.

    Attributes:
        backend: Name of the backend.
        base_url: The server's address.
        tokenizer: Name or folder of the model's tokenizer, or the object.
        parser: The tool-call format.
        transport: Carries the requests; aiohttp's when None. Scripted engines put theirs here.
        options: For the backend, such as `model`, `api_key` and `timeout_s`.
        tolerance_nats: How far a score may lie from a reported logprob.
        seed: What is drawn is drawn from it.
        seeds: Whether the server must keep to a request's seed. SGLang does so only in its deterministic mode.
        experts: Layers and experts a token of a mixture, for a server that does not say them; None otherwise.
        weights: A folder that the server can read, whose weights it is made to load again and again; None leaves the
            server's weights alone.
    """

    backend: str
    base_url: str
    tokenizer: Any
    parser: str = "auto"
    transport: TransportFactory | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance_nats: float = 0.05
    seed: int = 0
    seeds: bool = False
    experts: tuple[int, int] | None = None
    weights: str | None = None


@dataclass(frozen=True)
class Mark:
    """A place in the logs of a server: exchanges on its wire, and raw responses."""

    exchanges: int
    recorded: int


@dataclass
class Connected:
    """A target with its policy.

    Attributes:
        target: The server.
        policy: It generates through the recorder.
        recorder: Keeps the backend's raw responses.
        log: The log of its wire, where the backend takes a transport.
        live: The version of the weights that the suite loaded last; None when it has loaded none.
        changes: How often it has.
        names_versions: Whether answers name the weights that sampled them; False once one did not.
    """

    target: Target
    policy: Policy
    recorder: Recorder
    log: WireLog | None
    live: str | None = None
    changes: int = 0
    names_versions: bool = True

    @property
    def wire(self) -> WireKit[Heard] | None:
        """How the oracle reads the log; None where nothing is logged, or no installed package reads the wire."""
        if self.log is None or self.target.backend not in installed_wires():
            return None
        return find_wire(self.target.backend)

    @property
    def backend(self) -> Backend:
        """The backend itself, without the recorder."""
        return self.recorder.inner

    def mark(self) -> Mark:
        """Return how long the logs are."""
        return Mark(len(self.log.exchanges) if self.log is not None else 0, len(self.recorder.recorded))

    def heard(self, since: Mark) -> list[wire_reading.Heard]:
        """Read the generations since a mark: off the wire where it is known, else from the raw responses."""
        if self.wire is not None and self.log is not None:
            return wire_reading.generations(self.wire.read, self.log.exchanges[since.exchanges :])
        return recorder.generations(self.recorder.recorded[since.recorded :])

    def forget(self, since: Mark) -> None:
        """Drop what was logged since a mark."""
        if self.log is not None:
            del self.log.exchanges[since.exchanges :]
        del self.recorder.recorded[since.recorded :]


async def connect(target: Target) -> Connected:
    """Connect to the server, and check its chat template.

    Raises:
        BackendError, TemplateError, TokenizerError: As `Policy.connect` does.
    """
    log = WireLog(target.transport or _pool(target)) if _takes_transport(target.backend) else None
    options = dict(target.options)
    if log is not None:
        options["http_transport"] = log.transport
    recording = Recorder(create_backend(target.backend, target.base_url, **options))
    policy = await Policy.connect_async(backend=recording, tokenizer=target.tokenizer, parser=target.parser)
    return Connected(target, policy, recording, log)


def _pool(target: Target) -> TransportFactory:
    """Return the pool that the backend would have made: the log replaces it."""
    where = Address.of(target.base_url, backend=target.backend)
    options = target.options
    limit, connect_timeout_s = options.get("max_connections", 0), options.get("connect_timeout_s", 5.0)
    return functools.partial(ConnectionPool, where.socket, limit, connect_timeout_s)


def takes_chunks(backend: Backend) -> bool:
    """Return whether a backend can stream."""
    return "on_chunk" in inspect.signature(backend.generate).parameters


def _takes_transport(backend: str) -> bool:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == backend:
            return "http_transport" in inspect.signature(point.load()).parameters
    return False
