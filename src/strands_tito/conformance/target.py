"""The server under test: its backend, with a recorder of raw responses above and a log of its wire below."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any
from weakref import WeakKeyDictionary

from strands_tito.conformance import precision, recorder, wire_reading
from strands_tito.conformance.agents import TOOLS
from strands_tito.conformance.recorder import Recorder
from strands_tito.conformance.wire_log import Exchange, TransportFactory, WireLog
from strands_tito.conformance.wire_reading import WireGeneration
from strands_tito.testing.wire import WireKit, find_wire, installed_wires
from tito_core.backend import OptionalOutputs
from tito_core.backend.calls import generate
from tito_core.backend.errors import BackendError, BadRequestError
from tito_core.backend.http.address import Address
from tito_core.backend.http.connections import ConnectionPool
from tito_core.backend.protocol import Backend, TokenRequest
from tito_core.backend.registry import ENTRY_POINT_GROUP, create_backend
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds
from tito_core.model import Policy

FINITE_TOP_K = 20
"""`top_k` on a server that refuses requests without a finite one."""
LEAST_ROOM = 64
"""Tokens that the agents' tools must leave for a conversation; in a smaller context they have none."""


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
        tolerance_nats: Largest allowed difference between a score and a reported logprob; None chooses it by the dtype.
        dtype: Dtype of the server's logits, a key of `precision.TOLERANCES`, or "auto" to measure it.
        seed: Seed of everything that is drawn at random.
        seeds: Whether the server must obey a request's seed. SGLang does so only in its deterministic mode.
        experts: Layers and experts a token of a mixture-of-experts model, for a server that does not report them.
        weights: One or two folders that the server can read, whose weights it is made to load in turn; none leaves the
            server's weights alone.
    """

    backend: str
    base_url: str
    tokenizer: Any
    parser: str = "auto"
    transport: TransportFactory | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance_nats: float | None = None
    dtype: str = "auto"
    seed: int = 0
    seeds: bool = False
    experts: tuple[int, int] | None = None
    weights: tuple[str, ...] = ()


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
        folder: The folder whose weights the suite loaded last; None before the first update.
        weight_updates: Number of weight updates so far.
        reports_versions: Whether answers report weight versions; False after one that did not.
        needs_top_k: Whether every request needs a temperature and a finite `top_k`, as with vLLM's
            `--return-sampling-mask`.
        tools: Specs of the agents' tools.
        dtype: Dtype of the server's logits, as given or measured.
    """

    target: Target
    policy: Policy
    recorder: Recorder
    log: WireLog | None
    live_version: str | None = None
    folder: str | None = None
    weight_updates: int = 0
    reports_versions: bool = True
    needs_top_k: bool = False
    tools: list[Any] = field(default_factory=lambda: TOOLS)
    dtype: str = precision.UNKNOWN
    _read: WeakKeyDictionary[Exchange, list[WireGeneration]] = field(default_factory=WeakKeyDictionary, repr=False)

    @property
    def tolerance_nats(self) -> float:
        """Largest allowed difference between a score and a reported logprob, in nats."""
        given = self.target.tolerance_nats
        return precision.TOLERANCES[self.dtype] if given is None else given

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

    def accepted(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return sampling parameters in a form that the server accepts."""
        if not self.needs_top_k:
            return dict(parameters)
        if parameters.get("temperature", 1.0) == 0:
            return {**parameters, "temperature": 1.0, "top_k": 1}
        return {**parameters, "top_k": parameters["top_k"] if parameters.get("top_k", -1) > 0 else FINITE_TOP_K}

    def sampling(self, **parameters: Any) -> SamplingParams:
        """Return sampling parameters that the server accepts, with the policy's stop ids."""
        return self.policy.sampling(SamplingParams(**self.accepted(parameters)))

    def log_position(self) -> LogPosition:
        """Return the current length of the logs."""
        return LogPosition(len(self.log.exchanges) if self.log is not None else 0, len(self.recorder.recorded))

    def generations(self, since: LogPosition) -> list[WireGeneration]:
        """Return the generations since a position: from the wire if it can be read, else from raw responses."""
        if self.wire is not None and self.log is not None:
            for exchange in self.log.exchanges[since.exchanges :]:
                if (
                    exchange.whole and exchange not in self._read
                ):  # a conversation asks for all of its answers each turn
                    self._read[exchange] = wire_reading.generations(self.wire.read, [exchange])
            found = (self._read.get(exchange, ()) for exchange in self.log.exchanges[since.exchanges :])
            return [generation for each in found for generation in each]
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
    server = ConnectedServer(target, policy, recording, log)
    start = server.log_position()
    question: list[Any] = [{"role": "user", "content": [{"text": "Hi"}]}]
    prompt = policy.template.first_prompt(question, None, None).ids
    try:
        await generate(recording, TokenRequest(prompt, server.sampling(max_new_tokens=1), uuid.uuid4().hex))
    except BadRequestError:
        server.needs_top_k = True
    limit = policy.info.max_model_len
    with_tools = policy.template.first_prompt(question, None, TOOLS).ids
    if limit is not None and len(with_tools) + LEAST_ROOM > limit:
        server.tools = []
    server.dtype = target.dtype if target.dtype != precision.AUTO else await _measured_dtype(server, prompt)
    server.truncate_logs(start)
    return server


async def _measured_dtype(server: ConnectedServer, prompt: TokenIds) -> str:
    limit = server.policy.info.capabilities.top_logprobs
    k = precision.TOP if limit is None else min(precision.TOP, limit)
    if k < precision.LEAST_TOP or server.needs_top_k:
        return precision.UNKNOWN
    sampling, outputs = (
        server.sampling(max_new_tokens=precision.TOKENS, temperature=1.0),
        OptionalOutputs(top_logprobs=k),
    )
    request = TokenRequest(prompt, sampling, uuid.uuid4().hex, optional_outputs=outputs)
    try:
        response = await generate(server.recorder, request)
    except BackendError:  # the checks report it
        return precision.UNKNOWN
    return precision.dtype_of(response.columns["top_logprobs"].values)


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
