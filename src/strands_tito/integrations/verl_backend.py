"""verl: its own rollout servers as a backend, through the client that verl gives to an agent loop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from tito_core.backend.errors import BackendError, UnsupportedByServerError
from tito_core.backend.protocol import (
    MAY_BE_UNREPORTED,
    Capabilities,
    EngineInfo,
    OnChunk,
    RawResponse,
    RawScores,
    TokenRequest,
)
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds
from tito_engines.spec import EngineSpec, find, names

_COMMON = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    "ignore_eos",
)
"""Sampling parameters that all of verl's engines take by these names."""
_NO_OPTIONAL_OUTPUTS = Capabilities(
    top_logprobs=0, prompt_logprobs=False, routed_experts=False, sampling_mask=False, priority=False
)


class Client(Protocol):
    """The part of verl's `LLMServerClient` that is used here."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Sample an answer and return a `TokenOutput`."""


class VerlBackend:
    """The servers behind one agent loop. verl routes requests with one `request_id` to one server.

    verl's client does not report the prompt that a server saw, nor its length, so this part of law 4 is not checked.
    It cannot abort a single request or score text.

    Args:
        client: verl's client.
        rollout: verl's `actor_rollout_ref.rollout` configuration: `name`, `logprobs_mode`, `max_model_len`,
            `prompt_length`, `response_length`.
        model: The model's name, for the ledger.

    Attributes:
        steps: verl's global steps of the weights that answered, the first and the last of each answer so far. A ledger
            has one only where they are equal: verl does not say at which token the weights changed.
    """

    name = "verl"

    def __init__(self, client: Client, rollout: Mapping[str, Any], model: str = "policy") -> None:
        self._client = client
        self.steps: list[int] = []
        self.info = _info(rollout, model)
        spec = _spec(rollout)
        self._sampling_names = {} if spec is None else spec.sampling_names

    async def connect(self) -> EngineInfo:
        """Return what verl's configuration says; no server is contacted."""
        return self.info

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> RawResponse:
        """Sample an answer, without streaming.

        Raises:
            UnsupportedByServerError: The request has a grammar.
            BackendError: verl's client raised, such as Ray's errors of a server that died.
        """
        began, sampling = time.perf_counter(), parameters(request.sampling, self._sampling_names)
        try:
            output = await self._client.generate(
                request.session_id or request.request_id,
                prompt_ids=request.input_ids.tolist(),
                sampling_params=sampling,
            )
        except Exception as error:  # whatever it is, the agent's own code did not cause it
            raise BackendError(
                f"verl's client raised {type(error).__name__}: {str(error)[:1000]}",
                backend=self.name,
                request_id=request.request_id,
            ) from error
        steps = map(output.extra_fields.get, ("min_global_steps", "max_global_steps", "global_steps"))
        self.steps += [step for step in steps if step is not None]
        return _raw(output, request, time.perf_counter() - began)

    async def score(self, token_ids: TokenIds) -> RawScores:
        """Raise: verl's client cannot score.

        Raises:
            UnsupportedByServerError: Always.
        """
        raise UnsupportedByServerError("verl's client cannot score text; verl computes logprobs itself.")

    async def tokenize(self, text: str) -> None:
        """Return None: verl's client cannot encode text."""

    async def abort(self, request_id: str) -> None:
        """Do nothing: verl's client cannot abort a single request."""

    async def aclose(self) -> None:
        """Do nothing: verl owns the client."""


def parameters(sampling: SamplingParams, names: Mapping[str, str]) -> dict[str, Any]:
    """Return all sampling parameters as verl's servers take them, so that verl's configuration sets none of them.

    A seed of None is left out: verl's `full_determinism` sets one.

    Args:
        sampling: The parameters.
        names: The engine's names of those that engines name differently; see `EngineSpec.sampling_names`.

    Raises:
        UnsupportedByServerError: A parameter is set that these servers do not apply.
    """
    if sampling.grammar is not None:
        raise UnsupportedByServerError(
            "verl's servers take no grammar from an agent loop: do not force tool calls or structured output.",
            backend="verl",
        )
    sent: dict[str, Any] = {name: getattr(sampling, name) for name in _COMMON}
    sent |= {"logprobs": True, "max_tokens": sampling.max_new_tokens}
    sent |= {"stop_token_ids": list(sampling.stop_token_ids), **sampling.model_dump(mode="json")["extra"]}
    others: dict[str, Any] = {
        "min_new_tokens": sampling.min_new_tokens or None,
        "stop": list(sampling.stop) or None,
        "stop_regex": sampling.stop_patterns or None,
        "seed": sampling.seed,
    }
    for name, value in others.items():
        if value is not None and name not in names:
            raise UnsupportedByServerError(
                f"verl's servers of this engine do not apply {name}={value!r}: leave it out, or choose another engine "
                "as rollout.name.",
                backend="verl",
            )
        if value is not None:
            sent[names[name]] = value
    return sent


def _spec(rollout: Mapping[str, Any]) -> EngineSpec | None:
    """Return the engine of verl's configuration if a package here knows it, else None."""
    name = rollout.get("name")
    return find(name) if name in names() else None


def _info(rollout: Mapping[str, Any], model: str) -> EngineInfo:
    mode = rollout.get("logprobs_mode")  # vLLM's option; SGLang has none
    spec = _spec(rollout)
    processed = None if spec is None else spec.processed_logprobs
    if processed is None and mode is not None:
        processed = str(mode).startswith("processed")
    limit = rollout.get("max_model_len")
    longest = int(limit) if limit else int(rollout["prompt_length"]) + int(rollout["response_length"])
    return EngineInfo(
        backend="verl",
        model=model,
        max_model_len=longest - 1,  # verl reserves one token on SGLang
        version=str(rollout.get("name") or "unknown"),
        processed_logprobs=processed,
        capabilities=_NO_OPTIONAL_OUTPUTS,
        unreported=MAY_BE_UNREPORTED,
    )


def _raw(output: Any, request: TokenRequest, latency_s: float) -> RawResponse:
    ids = list(output.token_ids)
    sampling = request.sampling
    ended = bool(ids) and ids[-1] in sampling.stop_token_ids and not sampling.ignore_eos
    if output.stop_reason in ("aborted", "abort"):
        finish = "abort"
    else:  # verl reports "completed" for truncated answers too
        finish = "length" if len(ids) == sampling.max_new_tokens and not ended else "stop"
    fields = output.extra_fields
    first, last = fields.get("min_global_steps"), fields.get("max_global_steps", fields.get("global_steps"))
    known = last is not None and first in (None, last)
    return RawResponse(
        finish=finish,
        stop=ids[-1] if ended else None,
        output_ids=ids,
        logprobs=[] if output.log_probs is None and not ids else output.log_probs,
        cached_tokens=fields.get("num_cached_tokens"),
        versions=[(0, len(ids), str(last))] if known else (),
        latency_s=latency_s,
    )
