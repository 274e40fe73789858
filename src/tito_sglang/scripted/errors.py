"""The four error shapes of SGLang 0.5.23, one recorded body per kind of refusal.

Only values that a client reads are filled in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from strands_tito.testing.wire import WireResponse, json_response

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_INTEGERS = ("max_new_tokens", "top_k", "min_new_tokens", "n", "sampling_seed", "stream_interval")
_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_TEXTS = ("stop", "stop_token_ids", "stop_regex", "ignore_eos", "skip_special_tokens", "no_stop_trim", "watermark")
_OTHERS = ("spaces_between_special_tokens", "logit_bias", "custom_params", "beam_width", "choice")
FIELDS = (*_INTEGERS, *_FLOATS, *GRAMMARS, *_TEXTS, *_OTHERS)
"""The server's sampling fields."""


class Refused(Exception):
    """The request is refused before any response begins; it does not reach the script."""

    def __init__(self, response: WireResponse) -> None:
        super().__init__(response.status)
        self.response = response


class Rejected(Exception):
    """The engine refuses the request: a 400 with `{"error": {"message"}}`, or an event of a stream."""


class SchedulerRejected(Rejected):
    """The scheduler refuses the request after the HTTP layer accepted it: in a stream, by an aborted answer."""


class Killed(Exception):
    """The request crashes the server: the connection closes without a response, and the server stops listening."""


def rejection(message: str, status: int = 400) -> WireResponse:
    """`{"error": {"message"}}`: values that the engine rejects."""
    return json_response({"error": {"message": message}}, status)


def rejection_event(message: str) -> dict[str, Any]:
    """The same as an event of a stream, whose status is already 200."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}


def aborted_event(message: str, version: str) -> dict[str, Any]:
    """The scheduler's refusal as an event of a stream. It replaced the prompt by one token, and sampled another."""
    reason = {"type": "abort", "message": message, "status_code": 400, "err_type": "BadRequestError"}
    meta = {"id": "", "finish_reason": reason, "prompt_tokens": 1, "weight_version": version, "completion_tokens": 1}
    spans = [{"version": version, "start": 0, "end": 1}]
    logprobs: dict[str, Any] = {"input_token_logprobs": [], "output_token_logprobs": []}
    return {"output_ids": [0], "meta_info": {**meta, **logprobs, "cached_tokens": 0, "weight_versions": spans}}


def contract(message: str) -> WireResponse:
    """`{"error": "text"}`: unknown or wrongly typed sampling fields."""
    return json_response({"error": message}, 400)


def _flat(message: str, kind: str, status: int) -> Callable[..., WireResponse]:
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return lambda *_: json_response(body, status)


def _schema(kind: str, place: str, message: str) -> Callable[..., WireResponse]:
    """`{"object": "error", ...}`: a body that fails the schema."""
    return _flat(f"1 validation error:\n  {{'type': '{kind}', 'loc': {place}, 'msg': '{message}'}}", "Bad Request", 400)


queue_full = _flat("The request queue is full.", "503", 503)
no_tokenizer = _flat(
    "Internal server error during tokenization: 'NoneType' object has no attribute 'encode'", "InternalServerError", 500
)
malformed_json = _schema("json_invalid", "('body', 18)", "JSON decode error")
no_body = _schema("missing", "('body',)", "Field required")
no_object = _schema("dataclass_type", "('body',)", "Input should be a dictionary or an instance of GenerateReqInput")
bad_input_ids = _schema("value_error", "('body', 'input_ids')", "Value error, elements must be int or list; got str")
bad_sampling_params = _schema("dict_type", "('body', 'sampling_params')", "Input should be a valid dictionary")
bad_pause_mode = _schema("is_instance_of", "('body',)", "Input should be an instance of PauseGenerationReqInput")


def check_contract(params: Mapping[str, Any], input_ids: Any) -> None:
    """Refuse unknown sampling fields and values of a wrong type, as the server's contract check does."""
    if isinstance(input_ids, list) and input_ids and isinstance(input_ids[0], bool):
        raise Refused(contract("invalid type: boolean `true`, expected a sequence"))
    for name, value in params.items():
        if name not in FIELDS:
            raise Refused(contract(f"unknown field `{name}`, expected one of `{'`, `'.join(FIELDS)}`"))
        values = (value or []) if name == "stop_token_ids" else [value] * (value is not None)
        if name in (*_INTEGERS, "stop_token_ids") and set(map(type, values)) - {int}:
            raise Refused(contract('invalid type: string "a", expected i64'))
        if name in _FLOATS and set(map(type, values)) - {int, float}:
            raise Refused(contract('invalid type: string "a", expected f64'))


_RANGES = (
    ("temperature", 0, sys.float_info.max, "a non-negative finite number"),
    ("top_p", 5e-324, 1, "in (0, 1]"),
    ("min_p", 0, 1, "in [0, 1]"),
    ("frequency_penalty", -2, 2, "in [-2, 2]"),
    ("presence_penalty", -2, 2, "in [-2, 2]"),
    ("max_new_tokens", 0, sys.maxsize, "at least 0"),
)


def check_values(params: Mapping[str, Any], vocab_size: int) -> None:
    """Reject sampling values out of range; `Rejected` has the server's message."""
    for name, low, high, words in _RANGES:
        value = params.get(name)
        if value is not None and not low <= value <= high:
            raise Rejected(f"{name} must be {words}, got {value}.")
    if (top_k := params.get("top_k")) is not None and top_k != -1 and top_k < 1:
        raise Rejected(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    for token in params.get("logit_bias") or ():
        if not 0 <= int(token) < vocab_size:
            raise Rejected(f"logit_bias must has keys in [0, {vocab_size - 1}], got {token}.")
    if sum(params.get(name) is not None for name in GRAMMARS) > 1:
        raise Rejected("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
