"""The HTTP endpoints of a vLLM 0.32 server, modelled on recordings. Shares no code with the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from strands_tito.testing.wire import Answer, EngineState, Routes, WireResponse, json_response, now, random_id
from tito_vllm.scripted import errors, requests
from tito_vllm.scripted.errors import Refused

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
                parse = requests.completions if path == "/v1/completions" else requests.generate
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
