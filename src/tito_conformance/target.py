"""The server under test: how to connect to it, what is measured then, and every request of the suite's own."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tito_conformance.agents import TOOLS
from tito_conformance.checks import NOTHING, BrokenLawError, Tally, Where, refusing
from tito_conformance.dtype import TOLERANCES, UNKNOWN, dtype_of
from tito_conformance.log import Exchange, Recorder, TransportFactory, WireLog
from tito_conformance.oracle import check_stop_strings, check_text, compare_request
from tito_conformance.testing import find_wire, installed_wires
from tito_conformance.testing.wire import WireKit
from tito_conformance.wire import WireGeneration, generations
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import BackendError, BadRequestError, ProtocolViolationError, ServerChangedError, hidden
from tito_core.backend.generate import generate
from tito_core.backend.http.client import ConnectionPool
from tito_core.backend.http.connection import Address
from tito_core.backend.images import PromptImages
from tito_core.backend.protocol import Backend, EngineAdmin, OnChunk, TokenRequest, TokenResponse
from tito_core.backend.registry import ENTRY_POINT_GROUP, create_backend
from tito_core.backend.sampling import SamplingParams
from tito_core.entry_points import load
from tito_core.ledger import Finish
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Adapter
from tito_core.model import Policy

AUTO = "auto"
NOT_TOKEN_EXACT = (
    "This was one of the first answers: if the server is another one than {} with an API of the same form, such as a "
    "plain OpenAI-compatible server, it lacks what token-exact rollouts need: ids, logprobs, the prompt as read, and "
    "the request's own name in each answer."
)
UNKNOWN_ID = "A sampled id is not in the tokenizer, so its text is unknown."
FINITE_TOP_K = 20
"""`top_k` on a server that refuses requests without a finite one."""


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
        adapters: Names of LoRA adapters that the server has loaded, each with another effect.
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
    adapters: tuple[str, ...] = ()


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
    try:
        policy = await Policy.connect_async(backend=recording, tokenizer=target.tokenizer, parser=target.parser)
    except (ProtocolViolationError, BadRequestError) as error:
        error.advise(NOT_TOKEN_EXACT.format(target.backend))
        raise
    server = ConnectedServer(target, policy, recording, log)
    if server.wire is None:
        recording.raw = []
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
    server.clear_logs()
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
    limit = server.policy.info.capabilities.top_logprobs
    k = TOP if limit is None else min(TOP, limit)
    if k < LEAST_TOP or server.needs_top_k:
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
TOP, LEAST_TOP = 20, 4
"""Top logprobs that are requested, vLLM's default limit, and those with which samples can be judged."""
DTYPE_TOKENS = 8
"""Tokens whose likeliest alternatives show the grid."""
MOVED = {"top_p": 0.913, "top_k": 50, "min_p": 0.013, "presence_penalty": 0.313, "seed": 1}
"""Parameters that conversations change, and that a server may refuse, as vLLM does `min_p` where it speculates."""


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
        refused: Sampling parameters that the server refuses; conversations leave them out.
        tools: Specs of the agents' tools.
        dtype: Dtype of the server's logits, as given or measured.
        aborting: Requests that the suite aborts; no other may be aborted.
        unscored: Answers of this stage of the run that may be scored: prompt, parameters and answer.
        tally: Counts the checks of the run.
    """

    target: Target
    policy: Policy
    recorder: Recorder
    log: WireLog | None
    tally: Tally = field(default_factory=Tally)
    live_version: str | None = None
    folder: str | None = None
    weight_updates: int = 0
    reports_versions: bool = True
    needs_top_k: bool = False
    refused: set[str] = field(default_factory=set)
    tools: list[Any] = field(default_factory=lambda: TOOLS)
    dtype: str = UNKNOWN
    aborting: set[str] = field(default_factory=set)
    unscored: list[tuple[TokenIds, SamplingParams, TokenResponse]] = field(default_factory=list)
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

    @functools.cached_property
    def strips(self) -> bool:
        """Whether the tokenizer takes a first blank off a text."""
        return self.decode(self.policy.tokenizer.encode(" a", add_special_tokens=False)) != " a"

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids as servers do by default."""
        return str(self.policy.tokenizer.decode(list(ids)))

    def prompt_of(self, question: str, tools: list[Any] | None = None) -> TokenIds:
        """Return the ids of a question as the first message."""
        messages: list[Any] = [{"role": "user", "content": [{"text": question}]}]
        return self.policy.template.first_prompt(messages, None, tools).ids

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

    async def answer(
        self,
        prompt: TokenIds,
        sampling: SamplingParams,
        *,
        on_chunk: OnChunk | None = None,
        streamed: bool = False,
        outputs: OptionalOutputs | None = None,
        images: PromptImages | None = None,
        request_id: str = "",
        adapter: Adapter | None = None,
    ) -> TokenResponse:
        """Sample a completion of a prompt (collapsed if it has images), and compare request and answer with the wire.

        It is streamed with `on_chunk` or `streamed`; an empty `request_id` stands for a new one.

        Raises:
            BackendError: See `tito_core.backend.generate`.
            BrokenLawError: The client refuses the answer, or the wire has another request or answer.
        """
        name, updates = request_id or uuid.uuid4().hex, self.weight_updates
        request = TokenRequest(
            prompt, sampling, name, optional_outputs=outputs or OptionalOutputs(), images=images, adapter=adapter
        )
        stream = on_chunk or ((lambda _: None) if streamed else None)
        with refusing():
            response = await generate(self.policy.backend, request, stream)
        where = Where(streamed=stream is not None, request_id=response.request_id)
        asked = response.finish != Finish.ABORT or name in self.aborting or updates != self.weight_updates
        problem = f"the answer was aborted after {len(response.output_ids)} tokens, and nobody asked for that."
        self.tally.require("aborted", asked, problem, 0, where)
        for each in self.generations():
            if each.request_id == response.request_id:
                self._compare(request, response, each, where)
        if images is None and adapter is None and updates == self.weight_updates:
            self.unscored.append((prompt, sampling, response))
        return response

    def _compare(self, request: TokenRequest, response: TokenResponse, answer: WireGeneration, where: Where) -> None:
        """Compare a request of the suite's own, and what the client made of its answer, with the wire."""
        sent = request.sampling.model_dump(mode="json")
        prompt, stops = request.input_ids.tolist(), self.policy.stop_token_ids
        problems = compare_request(prompt, sent, response, answer, stops)
        for check, problem, *position in problems:
            self.tally.require(check, False, problem, where=replace(where, position=(*position, None)[0]))
        self.tally.require("requested", True, "")
        self.compare_text(answer, where)

    def compare_text(self, answer: WireGeneration, where: Where) -> None:
        """Compare the text of an answer with its ids, and its end with the stop strings."""
        if None in self.policy.tokenizer.convert_ids_to_tokens(answer.output_ids):
            self.tally.skip("text", UNKNOWN_ID, int(answer.text is not None))
            return
        ends = check_stop_strings(answer, self.decode, self.policy.stop_token_ids)
        for check, problem, *_ in (*ends, *check_text(answer, self.decode, strips=self.strips)):
            self.tally.require(check, False, problem, where=where)
        if answer.text is not None:
            self.compared("text", "decoded ids", answer.request_id)
            self.tally.require("text", True, "")

    def generations(self) -> list[WireGeneration]:
        """Return the generations since the log was cleared: from the wire if it can be read, else from the backend."""
        if self.wire is None or self.log is None:
            return list(self.recorder.raw or ())
        for exchange in self.log.exchanges:
            if exchange.whole and exchange not in self._read:  # a conversation reads all of its answers each turn
                self._read[exchange] = generations(self.wire.read, [exchange])
        return [each for exchange in self.log.exchanges for each in self._read.get(exchange, ())]

    def compared(self, column: str, source: str, *request_ids: str | None) -> None:
        """Note against what a column of some answers was compared; a second source is more than a law."""
        for each in request_ids:
            columns = self.recorder.answers[each].columns if each in self.recorder.answers else {}
            if columns.get(column, NOTHING if column == "text" else None) in (NOTHING, "law"):
                columns[column] = source

    def bodies(self, request_id: str | None) -> dict[str, Any]:
        """Return what was sent and answered in a request, as text without API keys; empty if it is not in the log."""
        if self.log is None or not request_id:
            return {}
        name = request_id.encode()
        found = [each for each in self.log.exchanges if name in each.sent or request_id in each.headers.values()]
        return {
            f"{each.method} {each.path}": {
                "status": each.status,
                "sent": hidden(each.sent.decode(errors="replace"))[:MOST_BODY],
                "got": hidden(each.got.decode(errors="replace"))[:MOST_BODY],
            }
            for each in found
        }

    async def expect_same_weights(self, broken: BrokenLawError) -> None:
        """Raise ServerChangedError if another client loaded weights since the connection, which explains a finding."""
        before = self.policy.info.weight_version
        if self.target.weights or before is None or not isinstance(self.backend, EngineAdmin):
            return
        try:
            now = await self.backend.weight_version()
        except BackendError:  # the finding stays
            return
        if now not in (before, None):
            raise ServerChangedError(
                f"Another client changed the server's weights during the run, from {before!r} to {now!r}, so scores "
                f"and equal requests differ. Run again while they stay. What this broke: {broken}",
                backend=self.target.backend,
            )

    def clear_logs(self) -> None:
        """Drop everything that was logged so far."""
        if self.log is not None:
            self.log.exchanges.clear()
        if self.recorder.raw is not None:
            self.recorder.raw.clear()


def can_stream(backend: Backend) -> bool:
    """Return whether a backend can stream."""
    return "on_chunk" in inspect.signature(backend.generate).parameters


MOST_BODY = 100_000
"""Characters of a body that a report holds."""
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
