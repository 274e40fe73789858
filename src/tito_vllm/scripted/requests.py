"""Requests of vLLM's two token endpoints: a JSON body in, a validated `Generation` out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from strands_tito.testing.script import ScriptedRequest
from strands_tito.testing.wire import Answer, EngineState, Generation, json_response, random_id
from tito_vllm.scripted import errors, images
from tito_vllm.scripted.completions import CompletionsAnswer
from tito_vllm.scripted.errors import Refused
from tito_vllm.scripted.generate import GenerateAnswer

_COMPLETIONS_MAX_TOKENS = 16  # the server's default on /v1/completions; /inference/v1/generate fills the context


def completions(state: EngineState, path: str, headers: Mapping[str, str], raw: bytes) -> Answer:
    """Parse `POST /v1/completions` with token ids; raise `Refused` where the server refuses it.

    A request for text alone under a regex that allows one text is answered with it: a script has only token ids.
    """
    body = _decoded(raw)
    if "prompt" not in body:
        raise Refused(errors.missing("prompt", len(body)))
    prompts = list(_prompts(body["prompt"]))
    if body.get("stream") and body.get("prompt_logprobs") is not None:
        raise Refused(errors.bad_value("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs"))
    _check_model(state, body)
    logprobs, echo = body.get("logprobs"), bool(body.get("echo"))
    max_tokens = body.get("max_tokens")
    if max_tokens is None:
        max_tokens = _COMPLETIONS_MAX_TOKENS
    for ids in prompts:
        _check_length(state, ids, completions=True)
    if echo and max_tokens == 0:
        max_tokens = 1
    errors.check_sampling(body, max_tokens)
    errors.check_logprobs(logprobs, state.vocab_size, state.max_logprobs)
    errors.check_replay(state, body)
    errors.check_budget(state, body)
    only = (body.get("structured_outputs") or {}).get("regex", "")
    if only.isalpha() and state.reasoning is None and not body.get("return_token_ids"):
        return json_response({"object": "text_completion", "choices": [{"index": 0, "text": only}]})
    prompt_logprobs = body.get("prompt_logprobs")
    if prompt_logprobs is None and echo:
        prompt_logprobs = logprobs
    server_id = f"cmpl-{headers.get('x-request-id') or body.get('request_id') or random_id(16)}"
    requests, samples = [], body.get("n") or 1
    for index, ids in enumerate(prompts):
        errors.check_vocabulary(ids, state.vocab_size)
        one = _scripted(state, body, body, ids, max_tokens, f"{server_id}-{index}", prompt_logprobs)
        requests += _samples(one, path, headers, samples)
    answer = CompletionsAnswer(state, body, server_id, logprobs, prompt_logprobs, samples, echo)
    return Generation(requests, answer, bool(body.get("stream")))


def generate(state: EngineState, path: str, headers: Mapping[str, str], raw: bytes) -> Generation:
    """Parse `POST /inference/v1/generate`; raise `Refused` where the server refuses it."""
    body = _decoded(raw)
    for name in ("token_ids", "sampling_params"):
        if name not in body:
            raise Refused(errors.missing(name, len(body)))
    ids, params = body["token_ids"], body["sampling_params"]
    if problems := errors.schema_problems(body):
        raise Refused(errors.invalid(*problems))
    if min(ids) < 0:
        raise Refused(errors.negative_token_ids(len(ids)))
    _check_model(state, body)
    errors.check_sampling(params, params.get("max_tokens"))
    ids, placed = images.expand(state, body, ids)  # before the engine's own checks, which follow
    errors.check_logprobs(params.get("logprobs"), state.vocab_size, state.max_logprobs)
    errors.check_replay(state, params)
    errors.check_budget(state, params)
    errors.check_vocabulary(ids, state.vocab_size)
    _check_length(state, ids, completions=False)
    server_id = f"generate-tokens-{headers.get('x-request-id') or body.get('request_id') or random_id(16)}"
    prompt_logprobs = params.get("prompt_logprobs")
    one = _scripted(state, body, params, ids, params.get("max_tokens"), server_id, prompt_logprobs)
    one = replace(one, images=placed)
    samples = params.get("n") or 1
    requests = _samples(one, path, headers, samples)
    answer = GenerateAnswer(state, body, server_id, params.get("logprobs"), prompt_logprobs, samples)
    return Generation(requests, answer, bool(body.get("stream")))


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        raise Refused(errors.invalid_json(raw)) from None
    if not isinstance(body, dict):
        raise Refused(errors.invalid({"type": "dict_type", "loc": "body", "msg": "Input should be a valid dictionary"}))
    return body


def _prompts(prompt: Any) -> Iterator[tuple[int, ...]]:
    """Yield one list of ids or a batch of them. Text prompts are refused, as a scripted engine has no tokenizer."""
    if prompt == "":
        message = "Either prompt or prompt_embeds must be provided and non-empty."
        raise Refused(errors.bad_value(message, "prompt"))
    if isinstance(prompt, str):
        raise Refused(errors.error("This scripted engine has no tokenizer: send the prompt as token ids.", "prompt"))
    if not prompt:
        raise Refused(errors.error("You must pass at least one prompt"))
    for ids in prompt if isinstance(prompt[0], list) else [prompt]:
        if not ids or set(map(type, ids)) != {int} or min(ids) < 0:
            raise Refused(errors.bad_prompt_ids(ids))
        yield tuple(ids)


def _check_model(state: EngineState, body: Mapping[str, Any]) -> None:
    name = body.get("model")
    if name is not None and name != state.model:
        raise Refused(errors.no_model(name, state.model))


def _check_length(state: EngineState, ids: Any, *, completions: bool) -> None:
    """Refuse a prompt of at least the context length, in the words of the endpoint."""
    size, limit = len(ids), state.max_model_len
    if size < limit:
        return
    if completions:
        message = (
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {size} input "
            "tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise Refused(errors.bad_value(message, "input_tokens", size))
    hint = "Make sure that `max_model_len` is no smaller than the number of text tokens"
    if size > limit:
        message = f"The decoder prompt (length {size}) is longer than the maximum model length of {limit}. {hint}."
    else:
        message = (
            f"The decoder prompt (length {size}) plus the number of requested output tokens (at least 1) is longer "
            f"than the maximum model length of {limit}. {hint} (prompt + requested output tokens)."
        )
    raise Refused(errors.error(message))


def _scripted(
    state: EngineState,
    body: Mapping[str, Any],
    params: Mapping[str, Any],
    ids: tuple[int, ...],
    max_tokens: int | None,
    server_id: str,
    prompt_logprobs: int | None,
) -> ScriptedRequest:
    """Return the engine-neutral request; `max_tokens` is clamped to the context, as on the server."""
    temperature = _or(params.get("temperature"), 1.0)
    room = state.max_model_len - len(ids)
    stop = params.get("stop") or ()
    limit = room if max_tokens is None else min(max_tokens, room)
    return ScriptedRequest(
        prompt_ids=ids,
        max_new_tokens=limit,
        temperature=temperature,
        top_p=_or(params.get("top_p"), 1.0),
        top_k=max(0, params.get("top_k") or 0),
        min_p=params.get("min_p") or 0.0,
        seed=params.get("seed"),
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        eos_ids=state.eos_ids,
        ignore_eos=bool(params.get("ignore_eos")),
        min_new_tokens=params.get("min_tokens") or 0,
        grammar=params.get("structured_outputs") if _constrains(state, body, ids) else None,
        reported_temperature=temperature or 1.0 if state.raw_logprobs is False else 1.0,
        reported_truncated=state.truncated_logprobs,
        reported_offsets=state.raw_logprobs is False,
        vocab_size=state.vocab_size,
        scoring=prompt_logprobs is not None and limit <= 1,
        server_id=server_id,
        wire="vllm",
        body=body,
    )


def _constrains(state: EngineState, body: Mapping[str, Any], ids: Sequence[int]) -> bool:
    """Return whether the server applies a grammar from the first token.

    With a reasoning parser it does so after the reasoning, unless `/inference/v1/generate`, whose body has `token_ids`,
    is told that it ended, or the prompt's last tag closes it.
    """
    if state.reasoning is None or ("token_ids" in body and body.get("reasoning_ended")):
        return True
    return next((token for token in reversed(ids) if token in state.reasoning), None) == state.reasoning[1]


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _samples(one: ScriptedRequest, path: str, headers: Mapping[str, str], n: int) -> list[ScriptedRequest]:
    """Return n samples of one prompt; the server adds the sample's index to the seed."""
    own = headers.get("x-request-id") or one.body.get("request_id") or one.server_id
    seeds = [None if one.seed is None else one.seed + index for index in range(n)]
    return [replace(one, path=path, headers=headers, request_id=own, seed=seed) for seed in seeds]
