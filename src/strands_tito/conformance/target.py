"""The server under test: its backend, with a recorder of raw responses above and a log of its wire below."""

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
from strands_tito.conformance.wire_reading import WireGeneration
from strands_tito.testing.wire import WireKit, find_wire, installed_wires
from tito_core.backend.http.address import Address
from tito_core.backend.http.connections import ConnectionPool
from tito_core.backend.protocol import Backend
from tito_core.backend.registry import ENTRY_POINT_GROUP, create_backend
from tito_core.model import Policy


@dataclass(frozen=True)
class Target:
    """A server to test, and how.

    Attributes:
        backend: Name of the backend.
        base_url: The server's address.
        tokenizer: Name or folder of the model's tokenizer, or the object.
        parser: The tool-call format.
        transport: Makes the transport of the requests; aiohttp's when None. Scripted engines bring their own.
        options: Options of the backend, such as `model`, `api_key` and `timeout_s`.
        tolerance_nats: Largest allowed difference between a score and a reported logprob.
        seed: Seed of everything that is drawn at random.
        seeds: Whether the server must obey a request's seed. SGLang does so only in its deterministic mode.
        experts: Layers and experts a token of a mixture-of-experts model, for a server that does not report them.
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
class LogPosition:
    """A position in a server's logs: the number of exchanges on its wire and of raw responses."""

    exchanges: int
    recorded: int


@dataclass
class ConnectedServer:
    """A target with its policy.

    Attributes:
        target: The server.
        policy: The policy, which generates through the recorder.
        recorder: Records the backend's raw responses.
        log: The log of its wire; None if the backend takes no transport.
        live_version: The weight version that the suite loaded last; None before the first update.
        weight_updates: Number of weight updates so far.
        reports_versions: Whether answers report weight versions; False after one that did not.
    """

    target: Target
    policy: Policy
    recorder: Recorder
    log: WireLog | None
    live_version: str | None = None
    weight_updates: int = 0
    reports_versions: bool = True

    @functools.cached_property
    def wire(self) -> WireKit[WireGeneration] | None:
        """The reader of the log; None if nothing is logged, or if no installed package reads the wire."""
        if self.log is None or self.target.backend not in installed_wires():
            return None
        return find_wire(self.target.backend)

    @property
    def backend(self) -> Backend:
        """The backend under test, without the recorder."""
        return self.recorder.inner

    def log_position(self) -> LogPosition:
        """Return the current length of the logs."""
        return LogPosition(len(self.log.exchanges) if self.log is not None else 0, len(self.recorder.recorded))

    def generations(self, since: LogPosition) -> list[WireGeneration]:
        """Return the generations since a position: from the wire if it can be read, else from raw responses."""
        if self.wire is not None and self.log is not None:
            return wire_reading.generations(self.wire.read, self.log.exchanges[since.exchanges :])
        return recorder.generations(self.recorder.recorded[since.recorded :])

    def truncate_logs(self, since: LogPosition) -> None:
        """Drop everything that was logged since a position."""
        if self.log is not None:
            del self.log.exchanges[since.exchanges :]
        del self.recorder.recorded[since.recorded :]


async def connect(target: Target) -> ConnectedServer:
    """Connect to the server, and certify its chat template.

    Raises:
        BackendError, TemplateError, TokenizerError: As `Policy.connect` does.
    """
    log = WireLog(target.transport or _pool(target)) if _takes_transport(target.backend) else None
    options = dict(target.options)
    if log is not None:
        options["http_transport"] = log.transport
    recording = Recorder(create_backend(target.backend, target.base_url, **options))
    policy = await Policy.connect_async(backend=recording, tokenizer=target.tokenizer, parser=target.parser)
    return ConnectedServer(target, policy, recording, log)


def _pool(target: Target) -> TransportFactory:
    """Return a factory of the pool that the backend would have made itself; the log sits above it."""
    where = Address.of(target.base_url, backend=target.backend)
    options = target.options
    limit, connect_timeout_s = options.get("max_connections", 0), options.get("connect_timeout_s", 5.0)
    return functools.partial(ConnectionPool, where.socket, limit, connect_timeout_s)


def can_stream(backend: Backend) -> bool:
    """Return whether a backend can stream."""
    return "on_chunk" in inspect.signature(backend.generate).parameters


def _takes_transport(backend: str) -> bool:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == backend:
            return "http_transport" in inspect.signature(point.load()).parameters
    return False
