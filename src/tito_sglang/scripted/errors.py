"""SGLang 0.5.23's four error shapes. Wordings are those of the recorded server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tito_core.testing.wire import WireResponse, json_response

# The sampling fields that the server knows, in the order in which it lists them when it meets another.
FIELDS = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
)
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_INTEGERS = ("max_new_tokens", "top_k", "min_new_tokens", "n", "sampling_seed", "stream_interval")
_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


class Refused(Exception):
    """The request is refused before any answer begins; reaches no script."""

    def __init__(self, response: WireResponse) -> None:
        super().__init__(response.status)
        self.response = response


class Rejected(Exception):
    """The request is refused inside the server: a 400 with `{"error": {"message"}}`, or an event of a stream."""


def rejection(message: str, status: int = 400) -> WireResponse:
    """`{"error": {"message"}}`: values that the engine rejects."""
    return json_response({"error": {"message": message}}, status)


def rejection_event(message: str) -> dict[str, Any]:
    """The same in a stream, whose status is 200 already."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}


def contract(message: str) -> WireResponse:
    """`{"error": "text"}`: unknown or wrongly typed sampling fields."""
    return json_response({"error": message}, 400)


def queue_full() -> WireResponse:
    """503 of a server that takes no more requests."""
    return json_response(
        {"object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503}, 503
    )


def no_tokenizer() -> WireResponse:
    """500 of `/tokenize` on a server that was started with `--skip-tokenizer-init`."""
    message = "Internal server error during tokenization: 'NoneType' object has no attribute 'encode'"
    kind = "InternalServerError"
    return json_response({"object": "error", "message": message, "type": kind, "param": None, "code": 500}, 500)


def malformed(*errors: Mapping[str, Any], line: int = 928, handler: str = "generate_request") -> WireResponse:
    """`{"object": "error", ...}`: a body that fails the schema, with the handler's place in the server's source."""
    path = "/generate" if handler == "generate_request" else f"/{handler}"
    many = "s" if len(errors) > 1 else ""
    lines = "".join(f"\n  {dict(e)}" for e in errors)
    shown = ", ".join(str(dict(e)) for e in errors)
    message = (
        f"{len(errors)} validation error{many}:{lines}\n\n"
        f'  File "site-packages/sglang/srt/entrypoints/http_server.py", line {line}, in {handler}\n'
        f"    POST {path} [{shown}]"
    )
    return json_response(
        {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}, 400
    )


def malformed_json(body: bytes) -> WireResponse:
    """A body that is not JSON. The server's own parser calls a cut body `unexpected end of data`."""
    place, words = 0, "unexpected character"
    try:
        json.loads(body)
    except json.JSONDecodeError as failure:
        place, words = failure.pos, failure.msg
        if place >= len(body.rstrip()):
            words = "unexpected end of data"
    except UnicodeDecodeError:
        words = "invalid unicode code point"
    return malformed(
        {
            "type": "json_invalid",
            "loc": ("body", place),
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": words},
        }
    )


def no_body() -> WireResponse:
    """An empty body."""
    return malformed({"type": "missing", "loc": ("body",), "msg": "Field required", "input": None})


def no_object(value: Any) -> WireResponse:
    """A body that is not an object, or one that came without a JSON content type."""
    name = "GenerateReqInput"
    return malformed(
        {
            "type": "dataclass_type",
            "loc": ("body",),
            "msg": f"Input should be a dictionary or an instance of {name}",
            "input": value,
            "ctx": {"class_name": name},
        }
    )


def bad_input_ids(value: Any, words: str) -> WireResponse:
    """`input_ids` that are no list, or hold something that is no id."""
    return malformed(
        {
            "type": "value_error",
            "loc": ("body", "input_ids"),
            "msg": f"Value error, {words}",
            "input": value,
            "ctx": {"error": ValueError(words)},
        }
    )


def bad_sampling_params(value: Any) -> WireResponse:
    """`sampling_params` that are no object."""
    place = ("body", "sampling_params")
    return malformed(
        {
            "type": "list_type",
            "loc": (*place, "list[dict[str,any]]"),
            "msg": "Input should be a valid list",
            "input": value,
        },
        {
            "type": "dict_type",
            "loc": (*place, "dict[str,any]"),
            "msg": "Input should be a valid dictionary",
            "input": value,
        },
    )


def bad_pause_mode(body: Any) -> WireResponse:
    """`/pause_generation` with another mode."""
    expected = "'abort', 'retract' or 'in_place'"
    name = "PauseGenerationReqInput"
    instance = {
        "type": "is_instance_of",
        "loc": ("body", f"is-instance[{name}]"),
        "msg": f"Input should be an instance of {name}",
        "input": body,
        "ctx": {"class": name},
    }
    literal = {
        "type": "literal_error",
        "loc": ("body", f"function-after[build_struct(), {name}]", "mode"),
        "msg": f"Input should be {expected}",
        "input": body["mode"],
        "ctx": {"expected": expected},
    }
    return malformed(instance, literal, line=1831, handler="pause_generation")


def _shown(value: Any) -> str:
    """How the server names a value of the wrong type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f"string {json.dumps(value)}"
    if isinstance(value, int | float):
        return f"{'integer' if isinstance(value, int) else 'floating point'} `{value}`"
    return "sequence" if isinstance(value, list) else "map"


def check_contract(params: Mapping[str, Any], input_ids: Any) -> None:
    """Refuses unknown sampling fields and values of another type, as the server's contract check does."""
    if isinstance(input_ids, list) and input_ids and isinstance(input_ids[0], bool):
        raise Refused(contract(f"invalid type: {_shown(input_ids[0])}, expected a sequence"))
    for name, value in params.items():
        if name not in FIELDS:
            known = ", ".join(f"`{field}`" for field in FIELDS)
            raise Refused(contract(f"unknown field `{name}`, expected one of {known}"))
        values = [value] if value is not None else []
        if name == "stop_token_ids":
            values = value or []
        if name in (*_INTEGERS, "stop_token_ids"):
            wrong, kind = [v for v in values if type(v) is not int], "i64"
        elif name in _FLOATS:
            wrong, kind = [v for v in values if type(v) not in (int, float)], "f64"
        else:
            continue
        if wrong:
            raise Refused(contract(f"invalid type: {_shown(wrong[0])}, expected {kind}"))


_RANGES: Sequence[tuple[str, Callable[[float], bool], str]] = (
    ("temperature", lambda v: 0 <= v < float("inf"), "temperature must be a non-negative finite number, got {}."),
    ("top_p", lambda v: 0 < v <= 1, "top_p must be in (0, 1], got {}."),
    ("min_p", lambda v: 0 <= v <= 1, "min_p must be in [0, 1], got {}."),
    ("top_k", lambda v: v == -1 or v >= 1, "top_k must be -1 (disable) or at least 1, got {}."),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "frequency_penalty must be in [-2, 2], got {}."),
    ("presence_penalty", lambda v: -2 <= v <= 2, "presence_penalty must be in [-2, 2], got {}."),
    ("max_new_tokens", lambda v: v >= 0, "max_new_tokens must be at least 0, got {}."),
)


def check_values(params: Mapping[str, Any], vocab_size: int) -> None:
    """Rejects sampling values out of range; `Rejected` carries the server's sentence."""
    for name, fits, words in _RANGES:
        value = params.get(name)
        if value is not None and not fits(value):
            raise Rejected(words.format(value))
    for token in params.get("logit_bias") or ():
        if not 0 <= int(token) < vocab_size:
            raise Rejected(f"logit_bias must has keys in [0, {vocab_size - 1}], got {token}.")
    if sum(params.get(name) is not None for name in GRAMMARS) > 1:
        raise Rejected("Only one of json_schema, regex, ebnf, or structural_tag can be set.")
