"""A scripted SGLang server, modelled on recordings of SGLang 0.5.23, and the reader of its wire.

The entry point `tito.wires` finds `KIT`. Both judge the backend, so they share no code with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tito_conformance.testing import sglang_requests as requests
from tito_conformance.testing.wire import (
    Answer,
    EngineState,
    Refused,
    Routes,
    WireKit,
    WireResponse,
    json_response,
    now,
    sse_response,
)
from tito_conformance.wire import WireExchange, WireGeneration, data_of, documents

VERSION = "0.5.23"
_OPEN = "/health"  # does not require the API key
_UNHEALTHY_AFTER = 20.0  # seconds of pause


class SGLangWire:
    """SGLang's endpoints: generate by token ids, information, abort, pause and weight versions."""

    name = "sglang"

    def __init__(self, state: EngineState) -> None:
        self.state = state
        get: dict[str, Callable[[], Answer]] = {
            "/health": self._health,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
            "/v1/models": self._models,
        }
        post: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weight_version": self._update_version,
            "/update_weights_from_disk": self._update_weights,
            "/tokenize": self._tokenize,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
        }
        self._routes = Routes(get, post, requests.malformed_json)

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
            return requests.generate(self.state, path, headers, body)
        except Refused as refused:
            return refused.response
        except requests.Rejected as rejected:
            if msgspec.json.decode(body).get("stream"):
                if isinstance(rejected, requests.SchedulerRejected):
                    return sse_response([requests.aborted_event(str(rejected), self.state.weight_version)])
                return sse_response([requests.rejection_event(str(rejected))])
            return requests.rejection(str(rejected))
        except requests.Killed:
            self.state.dead = True
            return WireResponse(500, close_after=0)

    def script_error(self, message: str) -> WireResponse:
        """See `Wire.script_error`."""
        return requests.rejection(f"scripted engine: {message}")

    def queue_full(self) -> WireResponse:
        """See `Wire.queue_full`."""
        return requests.queue_full()

    def _health(self) -> Answer:
        since = self.state.paused_since
        return WireResponse(503 if since is not None and time.monotonic() - since > _UNHEALTHY_AFTER else 200)

    def _model_info(self) -> Answer:
        model = self.state.renamed or self.state.model
        return json_response(
            {
                "model_path": model,
                "served_model_name": model,
                "tokenizer_path": self.state.model,
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
                "served_model_name": self.state.model,
                "enable_return_routed_experts": self.state.experts is not None,
                "enable_priority_scheduling": self.state.priorities,
                "schedule_low_priority_values_first": False,
                "sampling_mask_max_tokens": requests.SAMPLING_MASK_TOKENS,
                "mm_preprocess_cache_size_mb": None if self.state.images is None or self.state.images.decodes else 64,
                "dp_size": self.state.ranks,
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
        name = self.state.renamed or self.state.model
        model = {
            "id": name,
            "object": "model",
            "created": now(),
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self.state.max_model_len,
        }
        of_model = {"parent": name, "max_model_len": None}
        adapters = [{**model, "id": each, "root": folder, **of_model} for each, folder in self.state.adapters.items()]
        return json_response({"object": "list", "data": [model, *adapters]})

    def _tokenize(self, body: dict[str, Any]) -> Answer:
        """Accept any model name. A real server returns the tokenizer's `max_model_len`, which may differ."""
        if self.state.skip_tokenizer_init:
            return requests.no_tokenizer()
        if self.state.encode is None:
            return json_response({"detail": "Not Found"}, 404)
        ids = list(self.state.encode(str(body["prompt"]), bool(body.get("add_special_tokens", True))))
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self.state.max_model_len})

    def _abort(self, body: dict[str, Any]) -> Answer:
        """Abort by exact rid, or everything; unknown rids are ignored."""
        rid, everything = body.get("rid"), bool(body.get("abort_all"))
        self.state.abort(lambda request: everything or request.server_id == rid)
        return WireResponse(200)

    def _pause(self, body: dict[str, Any]) -> Answer:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return requests.bad_pause_mode(body)
        self.state.pause()
        if mode == "abort":
            self.state.abort(lambda request: True)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    def _continue(self, body: dict[str, Any]) -> Answer:
        self.state.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    def _update_version(self, body: dict[str, Any]) -> Answer:
        version = str(body["new_version"])
        if body.get("abort_all_requests", True):
            self.state.abort(lambda request: True)
        self.state.set_version(version)
        message = f"Weight version updated to {version}"
        return json_response({"success": True, "message": message, "new_version": version})

    def _update_weights(self, body: dict[str, Any]) -> Answer:
        message = "Succeeded to update model weights."
        if body.get("abort_all_requests"):
            self.state.abort(lambda request: True)
        self.state.renamed = str(body["model_path"])
        self.state.load(self.state.renamed)
        if (version := body.get("weight_version")) is not None:
            self.state.set_version(str(version))
            message += f" Weight version updated to {version}."
        if body.get("flush_cache", True):
            self.state.cache.clear()
        return json_response({"success": True, "message": message, "num_paused_requests": 0})

    def _load_adapter(self, body: dict[str, Any]) -> Answer:
        name = str(body["lora_name"])
        if name in self.state.adapters:
            return self._adapters(f"Failed to load LoRA adapter {name} because it is already loaded")
        self.state.load_adapter(name, str(body["lora_path"]))
        return self._adapters()

    def _unload_adapter(self, body: dict[str, Any]) -> Answer:
        name = str(body["lora_name"])
        return self._adapters(f"LoRA with name {name} does not exist." * (self.state.adapters.pop(name, None) is None))

    def _adapters(self, problem: str = "") -> Answer:
        answer = {"success": not problem, "error_message": problem or None, "loaded_adapters": self.state.adapters}
        return json_response(answer, 400 if problem else 200)


def read(exchange: WireExchange) -> WireGeneration | None:
    """Read a generation of `/generate`, whole or streamed; None for a score or anything else."""
    sent = json.loads(exchange.sent)
    sampling = sent.get("sampling_params") or {}
    if not exchange.path.endswith("/generate") or not sent.get("rid") or sampling.get("max_new_tokens") == 0:
        return None
    generation = WireGeneration(sent["rid"], list(sent["input_ids"]), sampling)
    answers = documents(exchange)
    meta = answers[-1]["meta_info"]
    generation.answered_id = meta.get("id")
    generation.images = [data_of(url["url"] if isinstance(url, dict) else url) for url in sent.get("image_data") or ()]
    generation.image_names = sent.get("mm_content_hashes") or [None] * len(generation.images)
    generation.image_tokens = meta.get("image_tokens")
    count = generation.completion_tokens = meta.get("completion_tokens")
    generation.output_ids = _whole([answer["output_ids"] for answer in answers], count)
    tables = [answer["meta_info"].get("output_token_logprobs") or [] for answer in answers]
    rows = _whole(tables, count)
    generation.logprobs, generation.logprob_ids = [row[0] for row in rows], [row[1] for row in rows]
    generation.echoed_ids = next((found for answer in answers if (found := answer.get("prompt_token_ids"))), None)
    reason = meta.get("finish_reason") or {}
    generation.finish, generation.stop = reason.get("type"), reason.get("matched")
    generation.prompt_tokens, generation.cached_tokens = meta.get("prompt_tokens"), meta.get("cached_tokens")
    generation.versions = [(v["start"], v["end"], v["version"]) for v in meta.get("weight_versions") or []] or None
    generation.text = answers[0].get("text") if len(answers) == 1 else None
    generation.routed_experts, generation.sampling_masks = (
        meta.get("routed_experts"),
        meta.get("output_token_sampling_mask"),
    )
    generation.prompt_logprobs = [(row[1], row[0]) for row in (meta.get("input_token_logprobs") or [])[1:]]
    if sent.get("top_logprobs_num"):
        tables = [answer["meta_info"].get("output_top_logprobs") or [] for answer in answers]
        generation.top_logprobs = [[(token, value) for value, token, _ in row] for row in _whole(tables, count)]
    return generation


def _whole(parts: list[list[Any]], count: int | None) -> list[Any]:
    """Join the parts of a stream: each event repeats the ones before, except with `--incremental-streaming-output`."""
    if len(parts) == 1 or len(parts[-1]) == count:
        return list(parts[-1])
    return [item for part in parts for item in part]


KIT = WireKit(read, SGLangWire)
