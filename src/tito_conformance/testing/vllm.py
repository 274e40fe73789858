"""A scripted vLLM server, modelled on recordings of vLLM 0.32.0. The entry point `tito.wires` finds `KIT`.

It tests the backend, so it shares no code with it: it imports only `tito_conformance.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tito_conformance.testing import vllm_answers as errors
from tito_conformance.testing import vllm_answers as images
from tito_conformance.testing.script import ScriptedRequest
from tito_conformance.testing.vllm_answers import CompletionsAnswer, GenerateAnswer, Refused
from tito_conformance.testing.vllm_reader import read
from tito_conformance.testing.wire import (
    Answer,
    EngineState,
    Generation,
    Routes,
    WireKit,
    WireResponse,
    json_response,
    now,
    random_id,
)

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


VERSION = "0.32.0"
_GUARDED = ("/v1", "/inference")  # require the API key
_PAUSE_MODES = ("abort", "wait", "keep")


class VLLMWire:
    """vLLM's endpoints: completions and generate by token ids, information, and admin calls of development mode."""

    name = "vllm"

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self._started = now()
        get: dict[str, Callable[[], Answer]] = {
            "/health": lambda: WireResponse(200),
            "/version": lambda: json_response({"version": VERSION}),
            "/v1/models": self._models,
            "/load": lambda: json_response({"server_load": state.running()}),
            "/is_paused": lambda: json_response({"is_paused": state.paused}),
            "/is_sleeping": lambda: json_response({"is_sleeping": False}),
            "/weight_info": lambda: json_response({"weight_version": state.weight_version}),
            "/get_world_size": lambda: json_response({"world_size": 1}),
        }
        post: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "/abort_requests": self._abort_any,
            "/inference/v1/abort_requests": self._abort,
            "/pause": self._pause,
            "/resume": self._resume,
            "/reset_prefix_cache": self._reset_cache,
            "/collective_rpc": self._collective_rpc,
            "/update_weight_version": self._update_version,
            "/detokenize": lambda body: json_response({"prompt": state.decode(body["tokens"])}),
            "/tokenize": self._tokenize,
        }
        self._routes = Routes(get, post, errors.invalid_json)

    def route(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """See `Wire.route`."""
        path, _, query = path.partition("?")
        if path.startswith(_GUARDED) and not self.state.admits(headers):
            return json_response({"error": "Unauthorized"}, 401)
        if path.startswith("/inference") and not self.state.scale_out:
            return errors.not_enabled()
        try:
            if path in ("/v1/completions", "/inference/v1/generate"):
                if method != "POST":
                    return json_response({"detail": "Method Not Allowed"}, 405)
                parse = completions if path == "/v1/completions" else generate
                return parse(self.state, path, headers, body)
            return self._routes.answer(method, path, body, query)
        except Refused as refused:
            return refused.response

    def script_error(self, message: str) -> WireResponse:
        """See `Wire.script_error`."""
        return errors.error(f"scripted engine: {message}", kind="ScriptError")

    def queue_full(self) -> None:
        """Return None: vLLM's queue has no limit."""

    def _models(self) -> Answer:
        state = self.state
        permission = {
            "id": f"modelperm-{random_id(16)}",
            "object": "model_permission",
            "created": now(),
            **{
                f"allow_{what}": what in ("sampling", "logprobs", "view")
                for what in ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning")
            },
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {
            "id": state.model,
            "object": "model",
            "created": self._started,
            "owned_by": "vllm",
            "root": state.model,
            "parent": None,
            "max_model_len": state.max_model_len,
            "permission": [permission],
        }
        of_model = {"parent": state.model, "max_model_len": None}
        adapters = [{**model, "id": name, "root": f"/adapters/{name}", **of_model} for name in state.adapters]
        return json_response({"object": "list", "data": [model, *adapters]})

    def _tokenize(self, body: dict[str, Any]) -> Answer:
        state = self.state
        if body.get("model") not in (None, state.model):
            return errors.no_model(body["model"], state.model)
        if state.skip_tokenizer_init:
            return errors.error("Tokenizer not available when `skip_tokenizer_init=True`")
        if state.encode is None:
            return json_response({"detail": "Not Found"}, 404)
        ids = list(state.encode(str(body["prompt"]), bool(body.get("add_special_tokens", True))))
        return json_response(
            {"count": len(ids), "max_model_len": state.max_model_len, "tokens": ids, "token_strs": None}
        )

    def _abort(self, body: dict[str, Any]) -> Answer:
        """Abort by full server ids; unknown ids are ignored."""
        ids = frozenset(body.get("request_ids") or ())
        self.state.abort(lambda request: request.server_id in ids)
        return WireResponse(200)

    def _abort_any(self, body: dict[str, Any]) -> Answer:
        """Abort in development mode; without ids, abort everything."""
        ids = frozenset(body.get("request_ids") or ())
        count = self.state.abort(lambda request: not ids or request.server_id in ids)
        return json_response({"status": "aborted", "aborted": len(ids) or count})

    def _pause(self, body: dict[str, Any]) -> Answer:
        """Hold new requests and clear the prefix cache, in every mode; only `abort` ends running requests."""
        if body.get("mode", "abort") not in _PAUSE_MODES:
            return errors.error(f"mode must be one of {', '.join(_PAUSE_MODES)}", "mode")
        self.state.pause()
        if body.get("mode", "abort") == "abort":
            self.state.abort(lambda request: True)
        return json_response({"status": "paused"})

    def _resume(self, body: dict[str, Any]) -> Answer:
        self.state.resume()
        return json_response({"status": "resumed"})

    def _reset_cache(self, body: dict[str, Any]) -> Answer:
        self.state.cache.clear()
        return json_response({"success": True})

    def _collective_rpc(self, body: dict[str, Any]) -> Answer:
        method = body.get("method")
        if method not in ("check_health", "reload_weights"):
            message = (
                "Call to collective_rpc method failed: Worker failed with error "
                f"''CPUWorker' object has no attribute '{method}'', "
                "please check the stack trace above for the root cause"
            )
            return errors.error(message, status=500, kind="InternalServerError")
        if path := (body.get("kwargs") or {}).get("weights_path"):
            self.state.load(str(path))
        return json_response({"results": [None]})

    def _update_version(self, body: dict[str, Any]) -> Answer:
        self.state.set_version(str(body["new_version"]))
        return json_response({"success": True, "new_version": self.state.weight_version})


KIT = WireKit(read, VLLMWire, cache_page=32)
"""The prefix cache of the recorded server has blocks of 32 tokens."""
