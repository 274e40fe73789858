"""A scripted vLLM server, modelled on recordings of vLLM 0.32.0, and the reader of its wire.

The entry point `tito.wires` finds `KIT`. Both judge the backend, so they share no code with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tito_conformance.testing import vllm_requests as requests
from tito_conformance.testing.wire import (
    Answer,
    EngineState,
    Refused,
    Routes,
    WireKit,
    WireResponse,
    json_response,
    now,
    random_id,
)
from tito_conformance.wire import WireExchange, WireGeneration, data_of, documents

_GUARDED = ("/v1", "/inference")  # require the API key
_PAUSE_MODES = ("abort", "wait", "keep")


class VLLMWire:
    """vLLM's endpoints: completions and generate by token ids, information, and admin calls of development mode."""

    name = "vllm"

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self._started = now()
        self._refuses = False
        get: dict[str, Callable[[], Answer]] = {
            "/health": lambda: WireResponse(200),
            "/version": lambda: json_response({"version": state.release}),
            "/v1/models": self._models,
            "/weight_info": lambda: json_response({"weight_version": state.weight_version}),
        }
        post: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "/abort_requests": self._abort_any,
            "/inference/v1/abort_requests": self._abort,
            "/pause": self._pause,
            "/resume": self._resume,
            "/reset_prefix_cache": self._reset_cache,
            "/collective_rpc": self._collective_rpc,
            "/update_weight_version": self._update_version,
            "/tokenize": self._tokenize,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        self._routes = Routes(get, post, requests.invalid_json)

    def route(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """See `Wire.route`."""
        path, _, query = path.partition("?")
        if path.startswith(_GUARDED) and not self.state.admits(headers):
            return json_response({"error": "Unauthorized"}, 401)
        if path.startswith("/inference") and not self.state.scale_out:
            return requests.not_enabled()
        try:
            if path in ("/v1/completions", "/inference/v1/generate"):
                if method != "POST":
                    return json_response({"detail": "Method Not Allowed"}, 405)
                if self.state.paused and self._refuses:
                    return requests.paused()
                parse = requests.completions if path == "/v1/completions" else requests.generate
                return parse(self.state, path, headers, body)
            return self._routes.answer(method, path, body, query)
        except Refused as refused:
            return refused.response

    def script_error(self, message: str) -> WireResponse:
        """See `Wire.script_error`."""
        return requests.error(f"scripted engine: {message}", kind="ScriptError")

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
        adapters = [{**model, "id": name, "root": folder, **of_model} for name, folder in state.adapters.items()]
        return json_response({"object": "list", "data": [model, *adapters]})

    def _tokenize(self, body: dict[str, Any]) -> Answer:
        state = self.state
        if body.get("model") not in (None, state.model):
            return requests.no_model(body["model"], state.model)
        if state.skip_tokenizer_init:
            return requests.error("Tokenizer not available when `skip_tokenizer_init=True`")
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
        """Hold or refuse new requests and clear the prefix cache, in every mode; only `abort` ends running requests."""
        mode = body.get("mode", "abort")
        if mode not in _PAUSE_MODES:
            return requests.error(f"mode must be one of {', '.join(_PAUSE_MODES)}", "mode")
        self._refuses = mode != "keep" and [int(part) for part in self.state.release.split(".")[:2]] >= [0, 33]
        self.state.pause()
        if mode == "abort":
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
            return requests.error(message, status=500, kind="InternalServerError")
        if path := (body.get("kwargs") or {}).get("weights_path"):
            self.state.load(str(path))
        return json_response({"results": [None]})

    def _update_version(self, body: dict[str, Any]) -> Answer:
        self.state.set_version(str(body["new_version"]))
        return json_response({"success": True, "new_version": self.state.weight_version})

    def _load_adapter(self, body: dict[str, Any]) -> Answer:
        name = str(body["lora_name"])
        if name in self.state.adapters:
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
            return requests.error(message, kind="InvalidUserInput")
        self.state.load_adapter(name, str(body["lora_path"]))
        return WireResponse(200, body=f"Success: LoRA adapter '{name}' added successfully.".encode())

    def _unload_adapter(self, body: dict[str, Any]) -> Answer:
        name = str(body["lora_name"])
        if self.state.adapters.pop(name, None) is None:
            return requests.error(f"The lora adapter '{name}' cannot be found.", status=404, kind="NotFoundError")
        return WireResponse(200, body=f"Success: LoRA adapter '{name}' removed successfully.".encode())


def read(exchange: WireExchange) -> WireGeneration | None:
    """Read a generation of `/inference/v1/generate` or `/v1/completions`, whole or streamed; None for anything else."""
    sent = json.loads(exchange.sent)
    generates = exchange.path.endswith("/inference/v1/generate")
    if not generates and not exchange.path.endswith("/v1/completions"):
        return None
    sampling = sent.get("sampling_params", sent) if generates else sent
    if sampling.get("logprobs") is None:  # a score
        return None
    generation = WireGeneration(
        exchange.headers["x-request-id"], list(sent["token_ids" if generates else "prompt"]), sampling
    )
    parts = [part for part in sent.get("content_parts") or () if part["type"] == "image_url"]
    generation.images = [data_of(part.get("url")) for part in parts]
    generation.image_names = [part.get("uuid") for part in parts]
    for answer in documents(exchange):
        generation.answered_id = answer.get("request_id") or answer.get("id") or generation.answered_id
        if placed := (answer.get("mm_placeholders") or {}).get("image"):
            generation.image_spans = [(span["offset"], span["length"]) for span in placed]
        if usage := answer.get("usage"):
            generation.prompt_tokens, generation.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if details := usage.get("prompt_tokens_details"):
                generation.cached_tokens = details.get("cached_tokens")
        for choice in answer.get("choices", ()):
            generation.output_ids += choice.get("token_ids") or []
            generation.prompt_logprobs += _scored(answer.get("prompt_logprobs") or choice.get("prompt_logprobs"))
            generation.routed_experts = choice.get("routed_experts") or generation.routed_experts
            generation.sampling_masks = choice.get("sampling_mask") or generation.sampling_masks
            _logprobs(generation, choice.get("logprobs"))
            generation.echoed_ids = (
                generation.echoed_ids or choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            )
            generation.finish = choice.get("finish_reason") or generation.finish
            generation.stop = generation.stop if choice.get("stop_reason") is None else choice["stop_reason"]
            if choice.get("weight_versions") is not None:
                generation.versions = [(v["start"], v["end"], v["version"]) for v in choice["weight_versions"]]
            if choice.get("text") is not None:
                generation.text = (generation.text or "") + choice["text"]
    return generation


def _logprobs(generation: WireGeneration, logprobs: Any) -> None:
    if logprobs is None:
        return
    if "content" in logprobs:
        for entry in logprobs["content"]:
            generation.logprobs.append(entry["logprob"])
            generation.logprob_ids.append(_id(entry))
            rows = [(_id(each), each["logprob"]) for each in entry.get("top_logprobs") or ()]
            generation.top_logprobs = [*(generation.top_logprobs or ()), rows]
        return
    generation.logprobs += logprobs["token_logprobs"]
    generation.logprob_ids += [int(token.split(":")[1]) for token in logprobs["tokens"]]
    for entry in logprobs.get("top_logprobs") or ():
        row = [(int(token.split(":")[1]), value) for token, value in (entry or {}).items()]
        generation.top_logprobs = [*(generation.top_logprobs or ()), row]


def _id(entry: dict[str, Any]) -> int:
    """Return a token's id; up to 0.31 it is only in `token`, "token_id:N"."""
    token = entry.get("token_id")
    return int(entry["token"].split(":")[1]) if token is None else int(token)


def _scored(entries: list[Any] | None) -> list[tuple[int, float | None]]:
    """Return (id, logprob) of the prompt's own tokens, which are the first of each entry."""
    scored: list[tuple[int, float | None]] = []
    for entry in entries or ():
        if entry is not None:
            [token, *_] = entry
            scored.append((int(token), entry[token]["logprob"]))
    return scored


KIT = WireKit(read, VLLMWire, cache_page=32)
"""The prefix cache of the recorded server has blocks of 32 tokens."""
