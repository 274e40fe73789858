"""transformers in this process as an engine: a third party's backend, found by its entry point.

It has no server, no wire and no base class. It loads a model from a folder, samples with `generate`, and copies the
prompt and the sampled tokens into a `RawResponse`, which the core checks.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LogitsProcessor

from tito_core.backend import BadRequestError, Capabilities, EngineInfo, RawResponse, RawScores, TokenRequest
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds

T = TypeVar("T")
NO_OUTPUTS = Capabilities(
    top_logprobs=0, prompt_logprobs=False, routed_experts=False, sampling_mask=False, priority=False
)
"""This engine has no optional outputs."""
UNSUPPORTED = ("grammar", "extra")
"""Sampling parameters that this engine does not support."""


class TransformersBackend:
    """Samples from a model in this process, one request at a time.

    Args:
        base_url: Folder of the model, or its name on the hub.
        model: Name of the model in ledgers; the folder's when None.
        device: Where torch computes, such as "cpu" or "cuda:0".
    """

    name = "transformers"

    def __init__(self, base_url: str, *, model: str | None = None, device: str = "cpu") -> None:
        self._folder, self._model_name, self._device = base_url, model, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers")
        self._aborts: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._info: EngineInfo | None = None

    async def connect(self) -> EngineInfo:
        if self._info is None:
            await self._run(self._load)
            assert self._info is not None
        return self._info

    async def generate(self, request: TokenRequest) -> RawResponse:
        sampling = request.sampling
        for name in UNSUPPORTED:
            if getattr(sampling, name):
                raise BadRequestError(f"transformers does not support {name}. Omit it.", backend=self.name)
        stop_now = self._aborts[request.request_id] = threading.Event()
        try:
            return await self._run(lambda: self._sample(request, stop_now))
        except asyncio.CancelledError:
            stop_now.set()  # the thread ends at its next token
            raise
        finally:
            self._aborts.pop(request.request_id, None)

    async def score(self, token_ids: TokenIds) -> RawScores:
        return RawScores(logprobs=await self._run(lambda: self._score(token_ids.tolist())), token_ids=token_ids)

    async def tokenize(self, text: str) -> list[int]:
        await self.connect()
        ids: list[int] = await self._run(lambda: self._tokenizer.encode(text, add_special_tokens=False))
        return ids

    async def abort(self, request_id: str) -> None:
        if (running := self._aborts.get(request_id)) is not None:
            running.set()

    async def aclose(self) -> None:
        """Nothing to close: the model lives as long as the backend."""

    async def _run(self, work: Callable[[], T]) -> T:
        """Run in the engine's one thread, so that the event loop is not blocked."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _load(self) -> None:
        if self._info is not None:  # another request loaded it first
            return
        transformers.utils.logging.set_verbosity_error()
        self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
        model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        self._model = model.to(self._device).eval()
        ends = self._model.generation_config.eos_token_id
        self._ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        self._model.generation_config = GenerationConfig()  # do not apply the model's own defaults
        self._info = EngineInfo(
            self.name,
            self._model_name or Path(self._folder).name,
            self._model.config.max_position_embeddings,
            transformers.__version__,
            vocab_size=self._model.get_input_embeddings().num_embeddings,
            capabilities=NO_OUTPUTS,
        )

    @torch.inference_mode()
    def _sample(self, request: TokenRequest, stop_now: threading.Event) -> RawResponse:
        began, sampling = time.perf_counter(), request.sampling
        prompt = torch.tensor([request.input_ids.tolist()], device=self._device)
        ends = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else self._ends)}
        if sampling.seed is None:
            torch.seed()
        else:
            torch.manual_seed(sampling.seed)
        done = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=_config(sampling, sorted(ends)),
            stopping_criteria=[lambda ids, scores: torch.full((1,), stop_now.is_set(), device=ids.device)],
            logits_processor=[_Penalties(sampling, prompt.shape[1])],
            tokenizer=self._tokenizer,
        )
        prompt_ids, output = (
            done.sequences[0, : prompt.shape[1]].tolist(),
            done.sequences[0, prompt.shape[1] :].tolist(),
        )
        logits = torch.stack([step[0] for step in done.logits]).float()  # raw, before any sampling parameter
        logprobs = torch.log_softmax(logits, -1)[torch.arange(len(output)), output]
        stop = output[-1] if output[-1] in ends else self._stop_string(output, sampling.stop)
        finish = "length" if len(output) == sampling.max_new_tokens else "abort"
        return RawResponse(
            response_id=request.request_id,
            finish=finish if stop is None else "stop",
            stop=stop,
            output_ids=output,
            logprobs=logprobs.tolist(),
            echoed=prompt_ids,
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(output),
            message="The request was aborted." if stop is None and finish == "abort" else None,
            latency_s=time.perf_counter() - began,
        )

    def _stop_string(self, output: list[int], stops: tuple[str, ...]) -> str | None:
        text = str(self._tokenizer.decode(output))
        return min((stop for stop in stops if stop in text), key=text.find, default=None)

    @torch.inference_mode()
    def _score(self, ids: list[int]) -> list[float | None]:
        logits = self._model(torch.tensor([ids], device=self._device)).logits[0, :-1].float()
        return [None, *torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]].tolist()]


class _Penalties(LogitsProcessor):
    """Presence and frequency penalties, which transformers lacks. The logits are already divided by the temperature."""

    def __init__(self, sampling: SamplingParams, prompt: int) -> None:
        temperature = sampling.temperature or 1.0
        self._presence, self._frequency = (
            sampling.presence_penalty / temperature,
            sampling.frequency_penalty / temperature,
        )
        self._prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt :], minlength=scores.shape[-1])
        return scores - self._presence * (counts > 0) - self._frequency * counts


def _config(sampling: SamplingParams, ends: list[int]) -> GenerationConfig:
    """Return every sampling parameter under transformers' name."""
    fields: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "repetition_penalty": sampling.repetition_penalty,
        "eos_token_id": ends or None,
        "pad_token_id": 0,
        "stop_strings": list(sampling.stop) or None,
        "return_dict_in_generate": True,
        "output_logits": True,
        "do_sample": sampling.temperature > 0,
    }
    if sampling.temperature > 0:
        fields |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": sampling.min_p,
        }
    return GenerationConfig(**fields)
