"""The server under test, and every request of the suite's own to it."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tito_conformance.agents import TOOLS
from tito_conformance.checks import BrokenLawError, Tally, Where, refusing
from tito_conformance.log import Recorder, TransportFactory
from tito_conformance.oracle import check_stop_strings, check_text, compare_request
from tito_conformance.wire import WireGeneration
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import BackendError, ServerChangedError
from tito_core.backend.generate import generate
from tito_core.backend.images import PromptImages
from tito_core.backend.protocol import Backend, EngineAdmin, OnChunk, TokenRequest, TokenResponse
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger import Finish
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Adapter
from tito_core.model import Policy
from tito_core.turn.answer import with_stop

AUTO = "auto"
TOP, LEAST_TOP = 20, 4
"""Top logprobs that are requested, vLLM's default limit, and those with which samples can be judged."""
UNKNOWN = "unknown"
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5, UNKNOWN: 0.05}
"""Largest allowed difference between a score and a reported logprob, in nats, by dtype."""
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


@dataclass
class ConnectedServer:
    """A target with its policy.

    Attributes:
        target: The server.
        policy: The policy, which generates through the recorder.
        recorder: Records what was sent and answered.
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

    @property
    def tolerance_nats(self) -> float:
        """Largest allowed difference between a score and a reported logprob, in nats."""
        given = self.target.tolerance_nats
        return TOLERANCES[self.dtype] if given is None else given

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
    def most_top(self) -> int:
        """How many of the likeliest tokens to ask for; 0 if what the server gives cannot judge samples."""
        limit = self.policy.info.capabilities.top_logprobs
        most = TOP if limit is None else min(TOP, limit)
        return 0 if most < LEAST_TOP or self.needs_top_k else most

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
        if response.stop is None:  # completed as in a turn; one that the server names stays as the wire has it
            response = with_stop(self.policy, request, response)
        where = Where(streamed=stream is not None, request_id=response.request_id)
        asked = response.finish != Finish.ABORT or name in self.aborting or updates != self.weight_updates
        problem = f"the answer was aborted after {len(response.output_ids)} tokens, and nobody asked for that."
        self.tally.require("aborted", asked, problem, 0, where)
        for each in self.recorder.generations():
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
            self.recorder.compared("text", "decoded ids", answer.request_id)
            self.tally.require("text", True, "")

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


def can_stream(backend: Backend) -> bool:
    """Return whether a backend can stream."""
    return "on_chunk" in inspect.signature(backend.generate).parameters
