"""Connect to a server, and measure what no API reports: parameters that it refuses, and the dtype of its logits."""

from __future__ import annotations

import functools
import inspect
import uuid
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tito_conformance.agents import TOOLS
from tito_conformance.log import Recorder, TransportFactory, WireLog
from tito_conformance.target import AUTO, UNKNOWN, ConnectedServer, Target
from tito_conformance.testing import find_wire, installed_wires
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import BackendError, BadRequestError, ProtocolViolationError
from tito_core.backend.generate import generate
from tito_core.backend.http.client import ConnectionPool
from tito_core.backend.http.connection import Address
from tito_core.backend.protocol import TokenRequest
from tito_core.backend.registry import ENTRY_POINT_GROUP, create_backend
from tito_core.entry_points import load
from tito_core.ledger.columns import TokenIds
from tito_core.model import Policy

NOT_TOKEN_EXACT = (
    "This was one of the first answers: if the server is another one than {} with an API of the same form, such as a "
    "plain OpenAI-compatible server, it lacks what token-exact rollouts need: ids, logprobs, the prompt as read, and "
    "the request's own name in each answer."
)

UNREAD_WIRE = (
    "The wire {0!r} is installed but was not read, because the backend {0!r} takes no http_transport: its answers were "
    "compared with its own raw responses. Name http_transport in its constructor and send through it, as HttpBackend "
    "does."
)


async def connect(target: Target) -> ConnectedServer:
    """Connect to the server, and certify its chat template.

    Raises:
        BackendError, TemplateError, TokenizerError: As `Policy.connect` does.
    """
    logged, options = _takes_transport(target.backend), dict(target.options)
    log = WireLog(target.transport or _pool(target)) if logged else WireLog()
    if logged:
        options["http_transport"] = log.transport
    wired = target.backend in installed_wires()
    read = find_wire(target.backend).read if logged and wired else None
    recording = Recorder(create_backend(target.backend, target.base_url, **options), log, read)
    try:
        policy = await Policy.connect_async(backend=recording, tokenizer=target.tokenizer, parser=target.parser)
    except (ProtocolViolationError, BadRequestError) as error:
        error.advise(NOT_TOKEN_EXACT.format(target.backend))
        raise
    server = ConnectedServer(target, policy, recording)
    if wired and not logged:
        server.tally.notes.append(UNREAD_WIRE.format(target.backend))
    prompt = server.prompt_of(GREETINGS[0])
    try:
        await generate(recording, TokenRequest(prompt, server.sampling(max_new_tokens=1), uuid.uuid4().hex))
    except BadRequestError:
        server.needs_top_k = True
    await _find_refused(server, prompt)
    limit = policy.info.max_model_len
    with_tools = server.prompt_of(GREETINGS[0], TOOLS)
    if limit is not None and len(with_tools) + LEAST_ROOM > limit:
        server.tools = []
    server.dtype = target.dtype if target.dtype != AUTO else await _measured_dtype(server)
    recording.clear()
    recording.answers.clear()
    return server


async def _find_refused(server: ConnectedServer, prompt: TokenIds) -> None:
    """Find which parameters of conversations the server refuses: all are sent at once, and alone if that is refused."""
    for names in (tuple(MOVED), *((name,) for name in MOVED)):
        sampling = server.sampling(max_new_tokens=1, **{name: MOVED[name] for name in names})
        try:
            await generate(server.recorder, TokenRequest(prompt, sampling, uuid.uuid4().hex))
            if len(names) > 1:
                return
        except BadRequestError as error:
            if len(names) == 1:
                server.refused |= set(names)
                server.tally.skip("requested", f"The server refuses {names[0]}: {error}")


async def _measured_dtype(server: ConnectedServer) -> str:
    """Sample until enough likely tokens show the grid of their logprobs: an answer may end at once."""
    k = server.most_top
    if not k:
        return UNKNOWN
    sampling = server.sampling(max_new_tokens=DTYPE_TOKENS, temperature=1.0, ignore_eos=True)
    rows: list[Any] = []
    for text in GREETINGS:
        request = TokenRequest(
            server.prompt_of(text), sampling, uuid.uuid4().hex, optional_outputs=OptionalOutputs(top_logprobs=k)
        )
        try:
            rows.append((await generate(server.recorder, request)).columns["top_logprobs"].values)
        except BackendError:  # the checks report it
            continue
        if (found := dtype_of(np.concatenate(rows))) != UNKNOWN:
            return found
    return UNKNOWN


GREETINGS = ("Hi", "Tell me a story.", "Count to ten.", "Name a colour.", "Write about rain.", "What is 17 * 3?")
"""Questions of the measurements: the first one, and more of them where answers end too early."""
DTYPE_TOKENS = 8
"""Tokens whose likeliest alternatives show the grid."""
MOVED = {"top_p": 0.913, "top_k": 50, "min_p": 0.013, "presence_penalty": 0.313, "seed": 1}
"""Parameters that conversations change, and that a server may refuse, as vLLM does `min_p` where it speculates."""
LEAST_ROOM = 64
"""Tokens that the agents' tools must leave for a conversation; in a smaller context they have none."""


def _takes_transport(backend: str) -> bool:
    factory = load(ENTRY_POINT_GROUP, backend)
    return factory is not None and "http_transport" in inspect.signature(factory).parameters


def _pool(target: Target) -> TransportFactory:
    """Return a factory of the pool that the backend would have made itself; the log sits above it."""
    where = Address.of(target.base_url, backend=target.backend)
    options = target.options
    limit, connect_timeout_s = options.get("max_connections", 0), options.get("connect_timeout_s", 5.0)
    return functools.partial(ConnectionPool, where.socket, limit, connect_timeout_s)


GRIDS = {"bfloat16": 2.0**-6, "float16": 2.0**-10}
"""Smallest step between logits of usual size, 4 to 32, in nats."""
OFF_GRID = 2e-5
"""How far from the grid a difference may be: float32 rounds the logprobs themselves."""
LEAST_ON_GRID = 0.95
LEAST_DIFFERENCES = 20
"""With fewer differences other than 0, the dtype is unknown."""


def dtype_of(top_logprobs: NDArray[Any]) -> str:
    """Return the dtype of a server's logits, which no API reports, as logprobs of the likeliest tokens show it.

    Logits in 16 bits lie on a coarse grid, and so do the differences of two tokens' logprobs at temperature 1.

    Args:
        top_logprobs: At temperature 1, shape (n, k), NaN where there are fewer.
    """
    rows = np.asarray(top_logprobs, np.float64)
    apart = (rows - np.nanmax(rows, axis=1, keepdims=True))[np.isfinite(rows)] if rows.size else np.zeros(0)
    apart = apart[apart < -OFF_GRID]
    if len(apart) < LEAST_DIFFERENCES:
        return UNKNOWN
    for name, step in GRIDS.items():
        off = np.abs(apart / step - np.rint(apart / step)) * step
        if np.mean(off < OFF_GRID) >= LEAST_ON_GRID:
            return name
    return "float32"
