"""A scripted SGLang server, modelled on recordings of SGLang 0.5.23. The entry point `tito.wires` finds `KIT`.

It tests the backend, so it shares no code with it: it imports only `tito_conformance.testing`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tito_conformance.testing import sglang_answers as errors
from tito_conformance.testing import sglang_answers as images
from tito_conformance.testing.script import PlacedImage, ScriptedRequest
from tito_conformance.testing.sglang_answers import GenerateAnswer, Killed, Refused, Rejected, SchedulerRejected
from tito_conformance.testing.sglang_reader import read
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
    sse_response,
)

_MAX_NEW_TOKENS = 128  # the server's default
SAMPLING_MASK_TOKENS = 4096  # the server's default --sampling-mask-max-tokens
_RESERVED = 6  # tokens of the context that a prompt must leave free


def generate(state: EngineState, path: str, headers: Mapping[str, str], raw: bytes) -> Generation:
    """Parse `POST /generate` with `input_ids`.

    Raises:
        Refused: A 400, also for a stream.
        Rejected: A 400, or an error event of a stream.
        Killed: The request crashes the server.
    """
    body = _decoded(headers, raw)
    input_ids: Any = body.get("input_ids")
    params: Any = body.get("sampling_params")
    _check_shape(input_ids, params)
    shared = params if isinstance(params, dict) else {}
    errors.check_contract(shared, input_ids)
    batch = bool(input_ids) and isinstance(input_ids[0], list)
    prompts: list[list[int]] = input_ids if batch else [input_ids]
    many = batch or (shared.get("n") or 1) > 1
    rids = _rids(state, body, len(prompts), shared.get("n") or 1, batch)
    requests = []
    for index, ids in enumerate(prompts):
        own = params[index] if isinstance(params, list) else shared
        errors.check_contract(own, None)
        placed: tuple[PlacedImage, ...] = ()
        if ids and not batch:
            expanded, placed = images.expand(state, body, ids)
            ids = list(expanded)
        _check(state, body, own, ids, batch)
        for sample in range(own.get("n") or 1):
            rid = rids[index * (own.get("n") or 1) + sample]
            one = _scripted(state, body, own, tuple(ids), rid, sample)
            requests.append(replace(one, path=path, headers=headers, images=placed))
    return Generation(requests, GenerateAnswer(state, body, many), bool(body.get("stream")))


def _decoded(headers: Mapping[str, str], raw: bytes) -> dict[str, Any]:
    if not raw:
        raise Refused(errors.no_body())
    if "json" not in headers.get("content-type", "application/json"):
        raise Refused(errors.no_object(raw))
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        raise Refused(errors.malformed_json(raw)) from None
    if not isinstance(body, dict):
        raise Refused(errors.no_object(body))
    return body


def _check_shape(input_ids: Any, params: Any) -> None:
    """Check the types of `input_ids` and `sampling_params` against the schema."""
    if input_ids is not None and not isinstance(input_ids, list):
        words = f"must be list or null; got {type(input_ids).__name__}"
        raise Refused(errors.bad_input_ids(input_ids, words))
    strange = set(map(type, input_ids or ())) - {int, list, bool}
    if strange:
        raise Refused(errors.bad_input_ids(input_ids, f"elements must be int or list; got {strange.pop().__name__}"))
    if params is not None and not isinstance(params, dict | list):
        raise Refused(errors.bad_sampling_params(params))


def _check(state: EngineState, body: Mapping[str, Any], params: Mapping[str, Any], ids: Any, batch: bool) -> None:
    """Run the engine's own checks in its order; a bad value that it does not check crashes it."""
    if ids is None and body.get("text") is not None and state.skip_tokenizer_init:
        raise Rejected(
            "The engine initialized with skip_tokenizer_init=True cannot accept text prompts. "
            "Please provide input_ids or re-initialize the engine with skip_tokenizer_init=False."
        )
    if ids is None and body.get("text") is not None:
        raise Rejected("This scripted engine has no tokenizer: send the prompt as input_ids.")
    if ids is None:
        raise Rejected("Either text, input_ids or input_embeds should be provided.")
    if not ids:
        if batch:
            raise Killed
        raise Rejected("input_ids cannot be empty.")
    errors.check_values(params, state.vocab_size)
    if state.skip_tokenizer_init and params.get("stop"):
        raise Rejected(
            f"stop={params['stop']} is unavailable when skip_tokenizer_init=True "
            "(requires tokenizer to decode tokens to text for matching)."
        )
    size, limit = len(ids), state.max_model_len
    if size >= limit:
        raise Rejected(f"The input ({size} tokens) is longer than the model's context length ({limit} tokens).")
    requested = _max_new_tokens(params, 0)
    if size + requested > limit:
        raise Rejected(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. "
            f"You requested a total of {size + requested} tokens: {size} tokens from the input messages and "
            f"{requested} tokens for the completion. Please reduce the number of tokens in the input messages "
            "or the completion to fit within the limit."
        )
    if size >= limit - _RESERVED:
        raise SchedulerRejected(
            f"Input length ({size} tokens) exceeds the maximum allowed length ({limit - _RESERVED} tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )
    if state.skip_tokenizer_init and any(params.get(name) is not None for name in errors.GRAMMARS):
        raise SchedulerRejected(
            "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported when the server is "
            "launched with --grammar-backend none"
        )
    start = body.get("logprob_start_len")
    if body.get("return_logprob") and start is not None and start > size:
        raise Rejected(
            f"req.logprob_start_len={start} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={size}. Please use a smaller logprob_start_len."
        )
    if body.get("return_sampling_mask"):
        _check_sampling_mask(params)
    if (body.get("top_logprobs_num") or 0) > state.vocab_size or min(ids) < 0 or max(ids) >= state.vocab_size:
        raise Killed


def _check_sampling_mask(params: Mapping[str, Any]) -> None:
    """Refuse a sampling mask without a finite `top_k`; the server treats greedy sampling as `top_k=1`."""
    top_k = params.get("top_k")
    effective = 1 if params.get("temperature") == 0 else 2**30 if top_k in (None, -1) else top_k
    if not 1 <= effective <= SAMPLING_MASK_TOKENS:
        raise Rejected(
            f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {SAMPLING_MASK_TOKENS}; "
            f"got top_k={effective}. Lower top_k or increase --sampling-mask-max-tokens."
        )


def _rids(state: EngineState, body: Mapping[str, Any], prompts: int, n: int, batch: bool) -> list[str]:
    """Return one request id per response: new ids for n samples, numbered ids for a batch; a running id is rejected."""
    rid = body.get("rid")
    if rid is None or n > 1:
        return [random_id(32) for _ in range(prompts * n)]
    if isinstance(rid, list):
        if twice := sorted({r for r in rid if rid.count(r) > 1}):
            raise Rejected(f"Duplicate request IDs detected within the request: {twice}")
        rids = list(rid)
    else:
        rids = [f"{rid}_{index}" for index in range(prompts)] if batch else [rid]
    for one in rids:
        if state.in_use(one):
            raise Rejected(f"Duplicate request ID detected: {one}")
    return rids


def _patterns(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the regular expressions that end an answer; a malformed one crashes the server."""
    patterns = params.get("stop_regex") or ()
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    try:
        for pattern in patterns:
            re.compile(pattern)
    except re.error:
        raise Killed from None
    return patterns


def _max_new_tokens(params: Mapping[str, Any], default: int) -> int:
    limit = params.get("max_new_tokens")
    return default if limit is None else int(limit)


def _scripted(
    state: EngineState, body: Mapping[str, Any], params: Mapping[str, Any], ids: Sequence[int], rid: str, sample: int
) -> ScriptedRequest:
    temperature = 1.0 if params.get("temperature") is None else params["temperature"]
    stop = params.get("stop") or ()
    seed = params.get("sampling_seed")
    grammar = {name: params[name] for name in errors.GRAMMARS if params.get(name) is not None}
    limit = _max_new_tokens(params, min(_MAX_NEW_TOKENS, state.max_model_len - len(ids)))
    return ScriptedRequest(
        prompt_ids=tuple(ids),
        max_new_tokens=limit,
        temperature=temperature,
        top_p=1.0 if params.get("top_p") is None else params["top_p"],
        top_k=max(0, params.get("top_k") or 0),
        min_p=params.get("min_p") or 0.0,
        seed=None if seed is None else seed + sample,
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_regex=_patterns(params),
        eos_ids=state.eos_ids,
        ignore_eos=bool(params.get("ignore_eos")),
        min_new_tokens=params.get("min_new_tokens") or 0,
        grammar=grammar or None,
        reported_temperature=1.0 if state.raw_logprobs is True else temperature or 1.0,
        reported_truncated=state.truncated_logprobs,
        reported_offsets=True,
        vocab_size=state.vocab_size,
        scoring=bool(body.get("return_logprob")) and (body.get("logprob_start_len") or -1) >= 0 and limit <= 1,
        request_id=rid,
        server_id=rid,
        wire="sglang",
        body=body,
    )


VERSION = "0.5.23"
_OPEN = ("/health", "/ready", "/metrics")  # do not require the API key
_UNHEALTHY_AFTER = 20.0  # seconds of pause
_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. "
    b"(When there are running or waiting requests, the operation will not be performed.)\n"
)


class SGLangWire:
    """SGLang's endpoints: generate by token ids, information, abort, pause and weight versions."""

    name = "sglang"

    def __init__(self, state: EngineState) -> None:
        self.state = state
        get: dict[str, Callable[[], Answer]] = {
            "/": lambda: json_response("SGLang is running"),
            "/health": self._health,
            "/health_generate": self._health,
            "/ping": lambda: WireResponse(200),
            "/ready": lambda: WireResponse(200),
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/v1/models": self._models,
            "/flush_cache": self._flush,
        }
        post: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "/abort_request": self._abort,
            "/flush_cache": lambda body: self._flush(),
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weight_version": self._update_version,
            "/update_weights_from_disk": self._update_weights,
            "/detokenize": self._detokenize,
            "/tokenize": self._tokenize,
        }
        self._routes = Routes(get, post, errors.malformed_json)

    def route(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """See `Wire.route`."""
        path = path.partition("?")[0]
        if not path.startswith(_OPEN) and not self.state.admits(headers):
            return json_response({"error": "Unauthorized"}, 401)
        if path != "/generate":
            return self._routes.answer(method, path, body)
        if method not in ("POST", "PUT"):
            return json_response({"detail": "Method Not Allowed"}, 405)
        try:
            return generate(self.state, path, headers, body)
        except Refused as refused:
            return refused.response
        except Rejected as rejected:
            if msgspec.json.decode(body).get("stream"):
                if isinstance(rejected, SchedulerRejected):
                    return sse_response([errors.aborted_event(str(rejected), self.state.weight_version)])
                return sse_response([errors.rejection_event(str(rejected))])
            return errors.rejection(str(rejected))
        except Killed:
            self.state.dead = True
            return WireResponse(500, close_after=0)

    def script_error(self, message: str) -> WireResponse:
        """See `Wire.script_error`."""
        return errors.rejection(f"scripted engine: {message}")

    def queue_full(self) -> WireResponse:
        """See `Wire.queue_full`."""
        return errors.queue_full()

    def _health(self) -> Answer:
        since = self.state.paused_since
        return WireResponse(503 if since is not None and time.monotonic() - since > _UNHEALTHY_AFTER else 200)

    def _model_info(self) -> Answer:
        model = self.state.model
        return json_response(
            {
                "model_path": model,
                "served_model_name": model,
                "tokenizer_path": model,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self.state.weight_version,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": self.state.images is not None,
                "has_audio_understanding": False,
                "model_type": "scripted" if self.state.images is None else "qwen2_5_vl",
                "architectures": ["ScriptedForCausalLM"],
            }
        )

    def _server_info(self) -> Answer:
        """Return the fields that our code reads; a real server lists all launch arguments."""
        return json_response(
            {
                "model_path": self.state.model,
                "enable_return_routed_experts": self.state.experts is not None,
                "enable_priority_scheduling": self.state.priorities,
                "schedule_low_priority_values_first": False,
                "sampling_mask_max_tokens": SAMPLING_MASK_TOKENS,
                "mm_preprocess_cache_size_mb": None if self.state.images is None or self.state.images.decodes else 64,
                "limit_mm_data_per_request": None,
                "trust_mm_content_hashes": False,
                "version": VERSION,
                "frontend": "python",
            }
        )

    def _loads(self) -> Answer:
        """Return the version; a real server also reports queues and memory of each worker."""
        return json_response({"version": VERSION, "accelerator": None, "num_accelerators": 1, "loads": []})

    def _models(self) -> Answer:
        model = {
            "id": self.state.model,
            "object": "model",
            "created": now(),
            "owned_by": "sglang",
            "root": self.state.model,
            "parent": None,
            "max_model_len": self.state.max_model_len,
        }
        of_model = {"parent": self.state.model, "max_model_len": None}
        adapters = [{**model, "id": name, "root": f"/adapters/{name}", **of_model} for name in self.state.adapters]
        return json_response({"object": "list", "data": [model, *adapters]})

    def _detokenize(self, body: dict[str, Any]) -> Answer:
        special = self.state.eos_ids if body.get("skip_special_tokens", True) else ()
        return json_response({"text": self.state.decode([i for i in body["tokens"] if i not in special])})

    def _tokenize(self, body: dict[str, Any]) -> Answer:
        """Accept any model name. A real server returns the tokenizer's `max_model_len`, which may differ."""
        if self.state.skip_tokenizer_init:
            return errors.no_tokenizer()
        if self.state.encode is None:
            return json_response({"detail": "Not Found"}, 404)
        ids = list(self.state.encode(str(body["prompt"]), bool(body.get("add_special_tokens", True))))
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self.state.max_model_len})

    def _abort(self, body: dict[str, Any]) -> Answer:
        """Abort by exact rid, or everything; unknown rids are ignored."""
        rid, everything = body.get("rid"), bool(body.get("abort_all"))
        self.state.abort(lambda request: everything or request.server_id == rid)
        return WireResponse(200)

    def _flush(self) -> Answer:
        """Clear the cache; refused while anything runs."""
        if self.state.running():
            return WireResponse(400, body=b"Flush cache failed.\n")
        self.state.cache.clear()
        return WireResponse(200, body=_FLUSHED)

    def _pause(self, body: dict[str, Any]) -> Answer:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return errors.bad_pause_mode(body)
        self.state.pause()
        if mode == "abort":
            self.state.abort(lambda request: True)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    def _continue(self, body: dict[str, Any]) -> Answer:
        self.state.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    def _update_version(self, body: dict[str, Any]) -> Answer:
        version = str(body["new_version"])
        self.state.set_version(version)
        message = f"Weight version updated to {version}"
        return json_response({"success": True, "message": message, "new_version": version})

    def _update_weights(self, body: dict[str, Any]) -> Answer:
        message = "Succeeded to update model weights."
        if body.get("abort_all_requests"):
            self.state.abort(lambda request: True)
        self.state.load(str(body["model_path"]))
        if (version := body.get("weight_version")) is not None:
            self.state.set_version(str(version))
            message += f" Weight version updated to {version}."
        if body.get("flush_cache", True):
            self.state.cache.clear()
        return json_response({"success": True, "message": message, "num_paused_requests": 0})


KIT = WireKit(read, SGLangWire)
