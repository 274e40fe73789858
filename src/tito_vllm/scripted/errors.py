"""vLLM 0.32's error bodies. Wordings are those of the recorded server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tito_core.testing.wire import EngineState, WireResponse, json_response


class Refused(Exception):
    """The request is answered with this error and reaches no script."""

    def __init__(self, response: WireResponse) -> None:
        super().__init__(response.status)
        self.response = response


def error(message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError") -> WireResponse:
    """`{"error": {message, type, param, code}}`."""
    return json_response({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def bad_value(message: str, param: str, value: Any = None) -> WireResponse:
    """A rejected value; the server repeats name and value at the end of its sentence."""
    shown = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
    return error(f"{message} ({shown})", param)


def no_model(name: str, served: str) -> WireResponse:
    """404 for an unknown model name."""
    return error(f"The model `{name}` does not exist. Valid aliases: {served}.", "model", 404, "NotFoundError")


def not_enabled() -> WireResponse:
    """403 of `/inference/v1/*` on a server that was started without `--enable-scale-out`."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    return error(message, status=403, kind="PermissionDeniedError")


def invalid(*errors: Mapping[str, Any]) -> WireResponse:
    """A body that fails the schema. `param` is the place of the first error."""
    many = "s" if len(errors) > 1 else ""
    lines = "".join(f"\n  {dict(e)}" for e in errors)
    return error(f"{len(errors)} validation error{many}:{lines}", errors[0]["loc"], kind="Bad Request")


def invalid_json(body: bytes) -> WireResponse:
    """A body that is not JSON; the place is the parser's."""
    place, words = 0, "Expecting value"
    try:
        json.loads(body)
    except json.JSONDecodeError as failure:
        place, words = failure.pos, failure.msg
    except UnicodeDecodeError:
        words = "Invalid UTF-8"
    return invalid(
        {
            "type": "json_invalid",
            "loc": f"body.{place}",
            "msg": "JSON decode error",
            "input": "<dict of 0 items>",
            "ctx": {"error": words},
        }
    )


def missing(name: str, given: int) -> WireResponse:
    """A required field that is absent from a body of `given` fields."""
    return invalid(
        {"type": "missing", "loc": f"body.{name}", "msg": "Field required", "input": f"<dict of {given} items>"}
    )


def bad_prompt_ids(prompt: Sequence[Any]) -> WireResponse:
    """Ids that are negative or no integers: the schema's complaints about every alternative that `prompt` may be."""
    numbered = list(enumerate(prompt))
    negative = [
        {
            "type": "greater_than_equal",
            "loc": f"body.prompt.{n}",
            "msg": "Input should be greater than or equal to 0",
            "input": str(value),
            "ctx": {"ge": 0},
        }
        for n, value in numbered
        if isinstance(value, int) and value < 0
    ]
    whole = {
        "type": "string_type",
        "loc": "body.prompt",
        "msg": "Input should be a valid string",
        "input": f"<list of {len(prompt)} items>",
    }
    return invalid(
        *negative,
        *(_wrong_type("list", f"body.prompt.{n}", value) for n, value in numbered),
        whole,
        *(_wrong_type("string", f"body.prompt.{n}", value) for n, value in numbered),
    )


def _wrong_type(kind: str, loc: str, value: Any) -> dict[str, Any]:
    return {"type": f"{kind}_type", "loc": loc, "msg": f"Input should be a valid {kind}", "input": str(value)}


def negative_token_ids(count: int) -> WireResponse:
    """`/inference/v1/generate` with a negative id."""
    words = "token_ids must not contain negative values"
    return invalid(
        {
            "type": "value_error",
            "loc": "body.token_ids",
            "msg": f"Value error, {words}",
            "input": f"<list of {count} items>",
            "ctx": {"error": ValueError(words)},
        }
    )


def empty_token_ids() -> WireResponse:
    """`/inference/v1/generate` without any id."""
    return invalid(
        {
            "type": "too_short",
            "loc": "body.token_ids",
            "msg": "List should have at least 1 item after validation, not 0",
            "input": "<list of 0 items>",
            "ctx": {"field_type": "List", "min_length": 1, "actual_length": 0},
        }
    )


_RANGES: Sequence[tuple[str, Callable[[float], bool], str, bool]] = (
    ("presence_penalty", lambda v: -2 <= v <= 2, "presence_penalty must be in [-2, 2], got {}.", False),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "frequency_penalty must be in [-2, 2], got {}.", False),
    ("temperature", lambda v: v >= 0, "temperature must be non-negative, got {}.", True),
    ("temperature", lambda v: v <= 2, "temperature must be in [0, 2], got {}.", True),
    ("top_p", lambda v: 0 < v <= 1, "top_p must be in (0, 1], got {}.", True),
    ("min_p", lambda v: 0 <= v <= 1, "min_p must be in [0, 1], got {}.", False),
)


def check_sampling(params: Mapping[str, Any], max_tokens: int | None) -> None:
    """Refuses sampling values out of range. Floats are shown as the server's floats (-1 as -1.0)."""
    for name, fits, words, named in _RANGES:
        value = params.get(name)
        if value is not None and not fits(value):
            message = words.format(float(value))
            raise Refused(bad_value(message, name, float(value)) if named else error(message))
    if (top_k := params.get("top_k")) is not None and top_k < -1:
        raise Refused(error(f"top_k must be 0 (disable), or at least 1, got {top_k}."))
    if max_tokens is not None and max_tokens < 1:
        message = f"max_tokens must be at least 1, got {max_tokens}."
        raise Refused(bad_value(message, "max_tokens", max_tokens))


def check_logprobs(logprobs: int | None, vocab_size: int, most: int) -> None:
    """Refuses more top logprobs than `--max-logprobs` allows; -1 asks for the whole vocabulary."""
    if logprobs is None:
        return
    wanted = vocab_size if logprobs == -1 else logprobs
    if wanted > most:
        message = f"Requested sample logprobs of {wanted}, which is greater than max allowed: {most}"
        raise Refused(bad_value(message, "logprobs", wanted))


def check_replay(state: EngineState, params: Mapping[str, Any]) -> None:
    """Refuses what a server with `--return-sampling-mask` cannot say the sampling distribution of."""
    if not state.sampling_masks:
        return
    if params.get("temperature", 1.0) <= 0:
        raise Refused(error("sampling distribution replay requires temperature > 0"))
    if (params.get("top_k") or 0) <= 0:
        why = "to bound sampling mask size, reduce transfer overhead, and avoid potential OOMs"
        raise Refused(error(f"sampling distribution replay requires top_k > 0 {why}"))


def check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Refuses ids at or past the vocabulary, naming the largest."""
    if ids and max(ids) >= vocab_size:
        raise Refused(error(f"Token id {max(ids)} is out of vocabulary"))
