"""The server under test, connected below the wire log."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from tito_conformance.wire_log import TransportFactory, WireLog
from tito_core.backend.protocol import Backend
from tito_core.backend.registry import ENTRY_POINT_GROUP
from tito_core.model import Policy

KNOWN_WIRES = ("vllm", "sglang")
"""The wires that the oracle can read."""


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


@dataclass
class Connected:
    """A target with its policy, and the log of its wire where the backend lets one listen.

    Attributes:
        live: The version of the weights that the suite loaded last; None when it has loaded none.
        changes: How often it has.
        names_versions: Whether answers name the weights that sampled them; False once one did not.
    """

    target: Target
    policy: Policy
    log: WireLog | None
    live: str | None = None
    changes: int = 0
    names_versions: bool = True

    @property
    def wire(self) -> str | None:
        """The wire that the oracle can read in the log, or None."""
        return self.target.backend if self.log is not None and self.target.backend in KNOWN_WIRES else None


async def connect(target: Target) -> Connected:
    """Connect to the server, and check its chat template.

    Raises:
        BackendError, TemplateError, TokenizerError: As `Policy.connect` does.
    """
    log = WireLog(target.transport) if _takes_transport(target.backend) else None
    options = dict(target.options)
    if log is not None:
        options["http_transport"] = log.transport
    policy = await Policy.connect_async(
        backend=target.backend,
        base_url=target.base_url,
        tokenizer=target.tokenizer,
        parser=target.parser,
        **options,
    )
    return Connected(target, policy, log)


def takes_chunks(backend: Backend) -> bool:
    """Tell whether a backend can stream."""
    return "on_chunk" in inspect.signature(backend.generate).parameters


def _takes_transport(backend: str) -> bool:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == backend:
            return "http_transport" in inspect.signature(point.load()).parameters
    return False
