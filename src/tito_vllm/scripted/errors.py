"""Error bodies of vLLM 0.32, one recorded body per kind of refusal; only values that a client reads are filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from strands_tito.testing.wire import EngineState, WireResponse, json_response


class Refused(Exception):
    """The request is answered with this error and does not reach the script."""

    def __init__(self, response: WireResponse) -> None:
        super().__init__(response.status)
        self.response = response


def error(message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError") -> WireResponse:
    """`{"error": {message, type, param, code}}`."""
    return json_response({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def bad_value(message: str, param: str, value: Any = None) -> WireResponse:
    """Return the error for a rejected value; the server appends name and value to its message."""
    shown = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
    return error(f"{message} ({shown})", param)


def no_model(name: str, served: str) -> WireResponse:
    """Return the 404 for an unknown model name."""
    return error(f"The model `{name}` does not exist. Valid aliases: {served}.", "model", 404, "NotFoundError")


def not_enabled() -> WireResponse:
    """Return the 403 of `/inference/v1/*` on a server without `--enable-scale-out`."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    return error(message, status=403, kind="PermissionDeniedError")


def invalid(*problems: Mapping[str, Any]) -> WireResponse:
    """Return the error for a body that fails the schema; `param` is the location of the first problem."""
    count = f"{len(problems)} validation error{'s' * (len(problems) > 1)}"
    shown = "".join(f"\n  {dict(problem)}" for problem in problems)
    return error(f"{count}:{shown}", problems[0]["loc"], kind="Bad Request")


def schema_problems(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the problems of a body of `/inference/v1/generate`: an empty prompt, a bad `reasoning_ended`."""
    problems: list[dict[str, Any]] = []
    if not body["token_ids"]:
        message = "List should have at least 1 item after validation, not 0"
        problems.append({"type": "too_short", "loc": "body.token_ids", "msg": message})
    if not isinstance(body.get("reasoning_ended"), bool | None):
        message = "Input should be a valid boolean, unable to interpret input"
        problems.append({"type": "bool_parsing", "loc": "body.reasoning_ended", "msg": message})
    return problems


def missing(name: str, fields: int) -> WireResponse:
    """Return the error for a missing required field in a body of `fields` fields."""
    shown = f"<dict of {fields} items>"
    return invalid({"type": "missing", "loc": f"body.{name}", "msg": "Field required", "input": shown})


def _schema(kind: str, place: str, message: str) -> Callable[..., WireResponse]:
    return lambda *_: invalid({"type": kind, "loc": place, "msg": message})


invalid_json = _schema("json_invalid", "body.38", "JSON decode error")
bad_prompt_ids = _schema("greater_than_equal", "body.prompt.1", "Input should be greater than or equal to 0")
negative_token_ids = _schema("value_error", "body.token_ids", "Value error, token_ids must not contain negative values")

_RANGES = (
    ("presence_penalty", -2, 2, "in [-2, 2]"),
    ("frequency_penalty", -2, 2, "in [-2, 2]"),
    ("temperature", 0, inf, "non-negative"),
    ("temperature", 0, 2, "in [0, 2]"),
    ("top_p", 5e-324, 1, "in (0, 1]"),
    ("min_p", 0, 1, "in [0, 1]"),
    ("top_k", -1, inf, "0 (disable), or at least 1"),
)


def check_sampling(params: Mapping[str, Any], max_tokens: int | None) -> None:
    """Refuse sampling values out of range. Integers of float fields are shown as floats (-1 as -1.0)."""
    for name, low, high, words in _RANGES:
        value = params.get(name)
        if value is not None and not low <= value <= high:
            value = value if name == "top_k" else float(value)
            raise Refused(bad_value(f"{name} must be {words}, got {value}.", name, value))
    if max_tokens is not None and max_tokens < 1:
        raise Refused(bad_value(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens))


def check_logprobs(logprobs: int | None, vocab_size: int, most: int) -> None:
    """Refuse more top logprobs than `--max-logprobs` allows; -1 means the whole vocabulary."""
    requested = vocab_size if logprobs == -1 else logprobs or 0
    if requested > most:
        message = f"Requested sample logprobs of {requested}, which is greater than max allowed: {most}"
        raise Refused(bad_value(message, "logprobs", requested))


def check_replay(state: EngineState, params: Mapping[str, Any]) -> None:
    """Refuse parameters that a server with `--return-sampling-mask` does not support."""
    if state.sampling_masks and (params.get("temperature", 1.0) <= 0 or (params.get("top_k") or 0) <= 0):
        raise Refused(error("sampling distribution replay requires temperature > 0 and top_k > 0"))


def check_budget(state: EngineState, params: Mapping[str, Any]) -> None:
    """Refuse a budget for thinking on a server without `--reasoning-parser`."""
    if params.get("thinking_token_budget") is not None and state.reasoning is None:
        message = (
            "thinking_token_budget is set but reasoning_config is not configured. Please set --reasoning-parser "
            "and/or --reasoning-config to use thinking_token_budget."
        )
        raise Refused(error(message))


def check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, naming the largest."""
    if ids and max(ids) >= vocab_size:
        raise Refused(error(f"Token id {max(ids)} is out of vocabulary"))
