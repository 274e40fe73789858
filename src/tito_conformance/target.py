"""The server under test: its backend, with a recorder of raw responses above and a log of its wire below."""

from __future__ import annotations

import base64
import copy
import functools
import inspect
import json
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, cast
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from tito_conformance import wire as wire_reading
from tito_conformance.checks import set_place
from tito_conformance.testing.moves import Ask, Look
from tito_conformance.testing.pictures import picture
from tito_conformance.testing.wire import WireKit, find_wire, installed_wires
from tito_conformance.wire import WireGeneration
from tito_conformance.wire_log import Exchange, TransportFactory, WireLog
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import BackendError, BadRequestError
from tito_core.backend.generate import generate
from tito_core.backend.http.client import ConnectionPool
from tito_core.backend.http.connection import Address
from tito_core.backend.id_text import SAME_ECHO
from tito_core.backend.images import PromptImages, expanded
from tito_core.backend.protocol import (
    Backend,
    EngineInfo,
    ImageScorer,
    Integers,
    OnChunk,
    RawResponse,
    RawScores,
    TokenRequest,
)
from tito_core.backend.registry import ENTRY_POINT_GROUP, create_backend
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds
from tito_core.model import Policy

Recorded = tuple[TokenRequest, RawResponse]
"""A request of the core, and the backend's raw response."""


class Recorder:
    """A backend that forwards everything to another one, and records its generations.

    Attributes:
        inner: The backend under test.
        recorded: Its generations, in the order of the responses.
        requests: Generations and scores that were requested so far.
        on_request: Called before each of them.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.recorded: list[Recorded] = []
        self.requests = 0
        self.on_request: Callable[[], None] = lambda: None

    async def connect(self) -> EngineInfo:
        """See `Backend.connect`."""
        return await self.inner.connect()

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """See `Backend.generate`."""
        self._count()
        sampling = request.sampling.model_dump(mode="json", exclude_defaults=True)
        set_place(sampling=sampling, streamed=on_chunk is not None)
        raw = await (self.inner.generate(request) if on_chunk is None else self.inner.generate(request, on_chunk))
        self.recorded.append((request, raw))
        return raw

    async def score(self, token_ids: TokenIds) -> RawScores:
        """See `Backend.score`."""
        self._count()
        return await self.inner.score(token_ids)

    async def score_with_images(self, token_ids: TokenIds, images: PromptImages) -> RawScores:
        """See `ImageScorer`; only for a backend that is one."""
        self._count()
        return await cast(ImageScorer, self.inner).score_with_images(token_ids, images)

    async def tokenize(self, text: str) -> Integers | None:
        """See `Backend.tokenize`."""
        return await self.inner.tokenize(text)

    async def abort(self, request_id: str) -> None:
        """See `Backend.abort`."""
        await self.inner.abort(request_id)

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        await self.inner.aclose()

    def _count(self) -> None:
        self.requests += 1
        self.on_request()


def generations(recorded: Iterable[Recorded]) -> list[WireGeneration]:
    """Convert raw responses to what the oracle reads."""
    return [_generation(request, raw) for request, raw in recorded]


def _generation(request: TokenRequest, raw: RawResponse) -> WireGeneration:
    output, prompt, images = _as_list(raw.output_ids), request.input_ids.tolist(), request.images
    echo = prompt if images is None else expanded(request.input_ids, images.placeholder, images.lengths).tolist()
    top = raw.top_logprobs() if callable(raw.top_logprobs) else raw.top_logprobs
    return WireGeneration(
        request_id=raw.request_id or request.request_id,
        prompt_ids=prompt,
        images=[] if images is None else [image.data for image in images.images],
        image_names=[] if images is None else [None] * len(images.images),
        image_spans=None if images is None or raw.media is None else [(int(o), int(n)) for o, n in raw.media],
        image_tokens=raw.image_tokens,
        sampling=request.sampling.model_dump(mode="json"),
        echoed_ids=echo if isinstance(raw.echoed, msgspec.Raw) and raw.echoed == SAME_ECHO else _ids(raw.echoed),
        output_ids=output,
        logprobs=_as_list(raw.logprobs),
        logprob_ids=output if raw.logprob_ids is None else _as_list(raw.logprob_ids),
        finish=raw.finish,
        stop=raw.stop,
        prompt_tokens=raw.prompt_tokens,
        completion_tokens=raw.completion_tokens,
        cached_tokens=raw.cached_tokens,
        versions=list(raw.versions) or None,
        top_logprobs=None if top is None else [[(int(token or 0), logprob) for token, logprob in row] for row in top],
        prompt_logprobs=[(int(token or 0), logprob) for token, logprob in raw.prompt_logprobs or ()],
        routed_experts=_base64(raw.routed_experts),
        sampling_masks=None if raw.sampling_mask is None else [_as_list(row) for row in raw.sampling_mask],
    )


def _as_list(values: Any) -> list[Any]:
    """Convert a list or an array to a list of Python values."""
    return list(values.tolist() if isinstance(values, np.ndarray) else values or ())


def _ids(echoed: Any) -> list[int] | None:
    if isinstance(echoed, bytes | msgspec.Raw):
        ids: list[int] | None = json.loads(bytes(echoed))
        return ids
    return None if echoed is None else _as_list(echoed)


def _base64(experts: Any) -> str | None:
    if isinstance(experts, np.ndarray):
        return base64.b64encode(np.ascontiguousarray(experts, "<i4").tobytes()).decode()
    return str(experts) if experts is not None else None


AUTO = "auto"
UNKNOWN = "unknown"
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, UNKNOWN: 0.05}
"""Largest allowed difference between a score and a reported logprob, in nats, by dtype."""
TOP = 20
LEAST_TOP = 4
TOKENS = 8
"""Tokens whose likeliest alternatives show the grid."""
GRIDS = {"bfloat16": 2.0**-6, "float16": 2.0**-10}
"""Smallest step between logits of usual size, 4 to 32, in nats."""
OFF_GRID = 2e-5
"""How far from the grid a difference may be: float32 rounds the logprobs themselves."""
LEAST_ON_GRID = 0.95
LEAST_DIFFERENCES = 20
"""With fewer differences other than 0, the dtype is unknown."""


def dtype_of(top_logprobs: NDArray[Any]) -> str:
    """Return the dtype that logprobs of the likeliest tokens show.

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


def center(signed: NDArray[Any]) -> float:
    """Return the mean or the median of differences with their signs, whichever is further from 0."""
    return max(float(np.mean(signed, dtype=np.float64)), float(np.median(signed)), key=abs)


Message = dict[str, Any]

TOOLS: list[Any] = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        },
    },
    {
        "name": "look_up",
        "description": "Look a word up; kinds are <noun> and [verb].",
        "inputSchema": {
            "json": {
                "type": "object",
                "properties": {"word": {"type": "string", "enum": ["tree", "house"]}, "exact": {"type": "boolean"}},
                "required": ["word"],
                "additionalProperties": False,
            }
        },
    },
]
"""Specs of the agents' tools. They allow no other arguments, as a forced weak policy would invent more."""
CLEARED = ("edit", "trim", "summary", "rewind", "retry", "new system prompt or tools")
"""Reasons of a branch after a history was cleared, or an answer without content was dropped."""
SYSTEM_PROMPTS = ("Be brief.", "You are an exact assistant.\nUse tools.", None)


@dataclass
class SimulatedAgent:
    """One agent.

    Attributes:
        messages: Its history.
        system: Its system prompt.
        model_state: Its `model_state` of Strands, which the model reads and writes.
        reasons: Reasons for which its next turn may branch: its history was changed since the last one.
    """

    messages: list[Message] = field(default_factory=list)
    system: str | None = SYSTEM_PROMPTS[0]
    model_state: dict[str, Any] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)

    def clear(self) -> None:
        """Drop the history."""
        self.messages.clear()
        self.reasons.update(CLEARED)

    def copied_messages(self) -> list[Message]:
        """Return a deep copy of the history, as Strands passes it to a model."""
        return copy.deepcopy(self.messages)

    def fingerprint(self) -> list[str]:
        """Return the system prompt and each message as JSON text, in which 1, 1.0 and true differ."""
        return [json.dumps(item, sort_keys=True, default=bytes.hex) for item in (self.system, *self.messages)]

    def pending_calls(self) -> list[Any]:
        """Return the calls of the last answer that have no results yet."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return []
        return tool_uses(self.messages[-1])

    def add_input(self, text: str, ask: Ask | None = None) -> None:
        """Add the input of the next answer: results of pending calls, or else a user text."""
        results = [_tool_result(call, text, ask or Ask()) for call in self.pending_calls()]
        self._add(results[::-1] if ask is not None and ask.reverse else results or [{"text": text or "?"}])

    def add_pictures(self, look: Look) -> None:
        """Add the input of the next answer with pictures: in each result of pending calls, or else next to a text."""
        blocks = _picture_blocks(look)
        results = [
            {"toolResult": {"toolUseId": call["toolUseId"], "status": "success", "content": copy.deepcopy(blocks)}}
            for call in self.pending_calls()
        ]
        self._add(results or blocks)

    def pictures(self) -> int:
        """Return the number of pictures in the history."""
        content = [message["content"] for message in self.messages]
        content += [block["toolResult"]["content"] for blocks in content for block in blocks if "toolResult" in block]
        return sum("image" in block for blocks in content for block in blocks)

    def _add(self, blocks: list[Any]) -> None:
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += blocks
        else:
            self.messages.append({"role": "user", "content": blocks})

    def all_calls(self) -> list[Any]:
        """Return every call of the history."""
        return [use for message in self.messages for use in tool_uses(message)]

    def edit(self, at: int, text: str) -> None:
        """Replace the text of a message that has one."""
        message = self.messages[at % len(self.messages)]
        if any("text" in block for block in message["content"]):
            message["content"] = [{"text": text} if "text" in block else block for block in message["content"]]

    def drop_first(self, count: int) -> None:
        """Drop the oldest messages, then go on to the next user text."""
        del self.messages[:count]
        while self.messages and not _is_user_text(self.messages[0]):
            del self.messages[0]

    def drop_last(self, count: int) -> None:
        """Drop the latest messages, and calls that lost their results."""
        del self.messages[max(0, len(self.messages) - count) :]
        while self.messages and (self.messages[-1]["role"] == "assistant" and self.pending_calls()):
            del self.messages[-1]


def tool_uses(message: Message) -> list[Any]:
    """Return the calls of one message."""
    return [block["toolUse"] for block in message["content"] if "toolUse" in block]


def _is_user_text(message: Message) -> bool:
    return message["role"] == "user" and not any("toolResult" in block for block in message["content"])


def _picture_blocks(look: Look) -> list[Any]:
    pictures = [{"image": {"format": "png", "source": {"bytes": picture(seed)}}} for seed in look.pictures]
    text = {"text": look.text or "?"}
    forms: dict[str, list[Any]] = {
        "before": [*pictures, text],
        "after": [text, *pictures],
        "around": [*pictures[:1], text, *pictures[1:], {"text": look.text[::-1] or "!"}],
        "alone": pictures,
    }
    return forms[look.form]


def _tool_result(call: Any, text: str, ask: Ask) -> Any:
    content: dict[str, list[Any]] = {
        "text": [{"text": text}],
        "json": [{"json": {"value": text, "n": [1, 1.5, True, None]}}],
        "blocks": [{"text": text}, {"text": text[::-1]}],
        "empty": [],
        "error": [{"text": f"Error: {text}"}],
    }
    status = "error" if ask.form == "error" else "success"
    return {"toolResult": {"toolUseId": call["toolUseId"], "status": status, "content": content[ask.form]}}


@dataclass
class Answer:
    """The answer of one model call.

    Attributes:
        message: The message, as Strands would store it.
        stop_reason: Strands' stop reason; None if the stream ended early.
    """

    message: Message
    stop_reason: str | None


async def collect_answer(events: AsyncIterator[Any], stop: threading.Event | None = None) -> Answer:
    """Assemble a stream of events into the message that Strands would store."""
    blocks: list[Any] = []
    reason, text, use, thought = None, "", None, ""
    async for event in events:
        if "contentBlockStart" in event:
            use = event["contentBlockStart"].get("start", {}).get("toolUse")
            use = None if use is None else {**use, "input": ""}
            text = thought = ""
        elif "contentBlockDelta" in event:
            delta = event["contentBlockDelta"]["delta"]
            text += delta.get("text", "")
            thought += delta.get("reasoningContent", {}).get("text", "")
            if use is not None:
                use["input"] += delta.get("toolUse", {}).get("input", "")
        elif "contentBlockStop" in event:
            blocks.append(_block(use, text, thought))
            use = None
        elif "messageStop" in event:
            reason = event["messageStop"]["stopReason"]
    return Answer({"role": "assistant", "content": blocks}, reason)


def _block(use: Any, text: str, thought: str) -> Any:
    if use is not None:
        return {"toolUse": {**use, "input": json.loads(use["input"] or "{}")}}
    if thought:
        return {"reasoningContent": {"reasoningText": {"text": thought}}}
    return {"text": text}


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
        dtype: Dtype of the server's logits, a key of `TOLERANCES`, or "auto" to measure it.
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
    dtype: str = UNKNOWN
    _read: WeakKeyDictionary[Exchange, list[WireGeneration]] = field(default_factory=WeakKeyDictionary, repr=False)

    @property
    def tolerance_nats(self) -> float:
        """Largest allowed difference between a score and a reported logprob, in nats."""
        given = self.target.tolerance_nats
        return TOLERANCES[self.dtype] if given is None else given

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
        return generations(self.recorder.recorded[since.recorded :])

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
    server.dtype = target.dtype if target.dtype != AUTO else await _measured_dtype(server, prompt)
    server.truncate_logs(start)
    return server


async def _measured_dtype(server: ConnectedServer, prompt: TokenIds) -> str:
    limit = server.policy.info.capabilities.top_logprobs
    k = TOP if limit is None else min(TOP, limit)
    if k < LEAST_TOP or server.needs_top_k:
        return UNKNOWN
    sampling, outputs = (
        server.sampling(max_new_tokens=TOKENS, temperature=1.0),
        OptionalOutputs(top_logprobs=k),
    )
    request = TokenRequest(prompt, sampling, uuid.uuid4().hex, optional_outputs=outputs)
    try:
        response = await generate(server.recorder, request)
    except BackendError:  # the checks report it
        return UNKNOWN
    return dtype_of(response.columns["top_logprobs"].values)


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
