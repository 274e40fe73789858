"""Requests to a scripted vLLM 0.32: parsed, checked in the server's order, and refused in its words.

Each kind of refusal has a body that was recorded; only values that a client reads are filled in.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import msgspec

from tito_conformance.testing.pictures import BadImage, ImageSettings, PlacedImage, place
from tito_conformance.testing.script import ScriptedRequest
from tito_conformance.testing.vllm_answers import CompletionsAnswer, GenerateAnswer
from tito_conformance.testing.wire import (
    Answer,
    EngineState,
    Generation,
    Refused,
    WireResponse,
    json_response,
    random_id,
    scripted_request,
)

_COMPLETIONS_MAX_TOKENS = 16  # the server's default on /v1/completions; /inference/v1/generate fills the context


def completions(state: EngineState, path: str, headers: Mapping[str, str], raw: bytes) -> Answer:
    """Parse `POST /v1/completions` with token ids; raise `Refused` where the server refuses it.

    A request for text alone under a regex that allows one text is answered with it: a script has only token ids.
    """
    body = _decoded(raw)
    if "prompt" not in body:
        raise Refused(missing("prompt", len(body)))
    ids = _prompt(body["prompt"])
    if body.get("stream") and body.get("prompt_logprobs") is not None:
        raise Refused(bad_value("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs"))
    _check_model(state, body)
    logprobs, max_tokens = body.get("logprobs"), body.get("max_tokens")
    if max_tokens is None:
        max_tokens = _COMPLETIONS_MAX_TOKENS
    _check_length(state, ids, completions=True)
    check_sampling(body, max_tokens)
    check_logprobs(logprobs, state.vocab_size, state.max_logprobs)
    check_replay(state, body)
    check_budget(state, body)
    only = (body.get("structured_outputs") or {}).get("regex", "")
    if only.isalpha() and state.reasoning is None and not body.get("return_token_ids"):
        return json_response({"object": "text_completion", "choices": [{"index": 0, "text": only}]})
    check_vocabulary(ids, state.vocab_size)
    server_id = f"cmpl-{headers.get('x-request-id') or body.get('request_id') or random_id(16)}"
    prompt_logprobs = body.get("prompt_logprobs")
    one = _scripted(state, body, body, ids, max_tokens, f"{server_id}-0", prompt_logprobs)
    answer = CompletionsAnswer(state, body, server_id, logprobs, prompt_logprobs)
    return Generation([_sent(one, path, headers)], answer, bool(body.get("stream")))


def generate(state: EngineState, path: str, headers: Mapping[str, str], raw: bytes) -> Generation:
    """Parse `POST /inference/v1/generate`; raise `Refused` where the server refuses it."""
    body = _decoded(raw)
    for name in ("token_ids", "sampling_params"):
        if name not in body:
            raise Refused(missing(name, len(body)))
    ids, params = body["token_ids"], body["sampling_params"]
    if problems := schema_problems(body):
        raise Refused(invalid(*problems))
    if min(ids) < 0:
        raise Refused(negative_token_ids(len(ids)))
    _check_model(state, body)
    check_sampling(params, params.get("max_tokens"))
    ids, placed = expand(state, body, ids)  # before the engine's own checks, which follow
    check_logprobs(params.get("logprobs"), state.vocab_size, state.max_logprobs)
    check_replay(state, params)
    check_budget(state, params)
    name, rows = "prompt_logprob_token_ids", params.get("prompt_logprob_token_ids")
    if rows is not None and state.model_runner < 2:
        raise Refused(bad_value(f"{name} requires the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1).", name))
    check_vocabulary(ids, state.vocab_size)
    _check_length(state, ids, completions=False)
    if rows is not None and len(rows) != (scored := len(ids) - 1):
        counted = f"{name} has {len(rows)} rows, but the prompt has {scored} scored rows"
        raise Refused(bad_value(f"{counted} (prompt_len - 1 - prompt_logprob_start).", name, len(rows)))
    server_id = f"generate-tokens-{headers.get('x-request-id') or body.get('request_id') or random_id(16)}"
    prompt_logprobs = params.get("prompt_logprobs")
    one = _scripted(state, body, params, ids, params.get("max_tokens"), server_id, prompt_logprobs)
    answer = GenerateAnswer(state, body, server_id, params.get("logprobs"), prompt_logprobs)
    return Generation([_sent(replace(one, images=placed), path, headers)], answer, bool(body.get("stream")))


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        raise Refused(invalid_json(raw)) from None
    if not isinstance(body, dict):
        raise Refused(invalid({"type": "dict_type", "loc": "body", "msg": "Input should be a valid dictionary"}))
    return body


def _prompt(prompt: Any) -> tuple[int, ...]:
    """Return the ids. Text prompts are refused, as a scripted engine has no tokenizer."""
    if prompt == "":
        message = "Either prompt or prompt_embeds must be provided and non-empty."
        raise Refused(bad_value(message, "prompt"))
    if isinstance(prompt, str):
        raise Refused(error("This scripted engine has no tokenizer: send the prompt as token ids.", "prompt"))
    if not prompt:
        raise Refused(error("You must pass at least one prompt"))
    if set(map(type, prompt)) != {int} or min(prompt) < 0:
        raise Refused(bad_prompt_ids(prompt))
    return tuple(prompt)


def _check_model(state: EngineState, body: Mapping[str, Any]) -> None:
    name = body.get("model")
    if name is not None and name != state.model and name not in state.adapters:
        raise Refused(no_model(name, state.model))


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
        raise Refused(bad_value(message, "input_tokens", size))
    hint = "Make sure that `max_model_len` is no smaller than the number of text tokens"
    if size > limit:
        message = f"The decoder prompt (length {size}) is longer than the maximum model length of {limit}. {hint}."
    else:
        message = (
            f"The decoder prompt (length {size}) plus the number of requested output tokens (at least 1) is longer "
            f"than the maximum model length of {limit}. {hint} (prompt + requested output tokens)."
        )
    raise Refused(error(message))


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
    room = state.max_model_len - len(ids)
    limit = room if max_tokens is None else min(max_tokens, room)
    temperature = params.get("temperature")
    return scripted_request(
        state,
        body,
        params,
        ids,
        wire="vllm",
        max_new_tokens=limit,
        seed=params.get("seed"),
        min_new_tokens=params.get("min_tokens") or 0,
        grammar=params.get("structured_outputs") if _constrains(state, body, ids) else None,
        reported_temperature=temperature or 1.0 if state.raw_logprobs is False else 1.0,
        reported_offsets=state.raw_logprobs is False,
        scoring=prompt_logprobs is not None and limit <= 1,
        server_id=server_id,
        adapter=body.get("model") if body.get("model") in state.adapters else None,
    )


def _constrains(state: EngineState, body: Mapping[str, Any], ids: Sequence[int]) -> bool:
    """Return whether the server applies a grammar from the first token.

    With a reasoning parser it does so after the reasoning, unless `/inference/v1/generate`, whose body has `token_ids`,
    is told that it ended, or the prompt's last tag closes it.
    """
    if state.reasoning is None or ("token_ids" in body and body.get("reasoning_ended")):
        return True
    return next((token for token in reversed(ids) if token in state.reasoning), None) == state.reasoning[1]


def _sent(one: ScriptedRequest, path: str, headers: Mapping[str, str]) -> ScriptedRequest:
    """Return the request with what its client sent besides the body."""
    own = headers.get("x-request-id") or one.body.get("request_id") or one.server_id
    return replace(one, path=path, headers=headers, request_id=own)


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
    """Refuse sampling values out of range. Integers of float fields are shown as floats (-1 as -1.0).

    A scripted server gives one answer to one prompt, without the prompt's text.
    """
    if (params.get("n") or 1) > 1 or params.get("echo"):
        raise Refused(error("This scripted engine gives one answer, without an echo of the prompt: omit n and echo."))
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


def expand(
    state: EngineState, body: Mapping[str, Any], ids: Sequence[int]
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """Return the prompt as the server reads it, and its images; raise `Refused` where the server refuses it.

    Parts of an unknown type are ignored. With too few placeholders the server decodes the whole prompt and encodes it
    again, so that text which spells a placeholder becomes one.
    """
    parts = [part for part in body.get("content_parts") or () if part.get("type") == "image_url"]
    if not parts:
        return tuple(ids), ()
    settings = state.images
    if settings is None:
        raise Refused(error(f"{state.model} is not a multimodal model"))
    if len(parts) > settings.limit:
        message = f"At most {settings.limit} image(s) may be provided in one prompt."
        raise Refused(bad_value(message, "image"))
    pictures = [_picture(state, index, part) for index, part in enumerate(parts)]
    try:
        return _placed(state, settings, ids, pictures)
    except BadImage as bad:
        raise Refused(error(f"Failed to load image: {bad}")) from None


def _placed(
    state: EngineState, settings: ImageSettings, ids: Sequence[int], pictures: Sequence[bytes]
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    expanded, placed = place(ids, pictures, settings)
    if len(placed) < len(pictures) and state.encode is not None:
        expanded, placed = place(state.encode(state.decode(ids), False), pictures, settings)
    if len(placed) < len(pictures):
        message = f"Failed to apply prompt replacement for mm_items['image'][{len(placed)}]"
        raise Refused(error(message, status=500, kind="InternalServerError"))
    return expanded, placed


def _picture(state: EngineState, index: int, part: Mapping[str, Any]) -> bytes:
    """Return a part's picture. The server believes its `uuid`: a picture that it knows by that name is not read."""
    name, url = part.get("uuid"), part.get("url")
    if name is not None and name in state.known_images:
        return state.known_images[name]
    if url is None and name is None:
        where = f"multi_modal_data['image'][{index}] is empty but multi_modal_uuids['image'][{index}] is missing."
        raise Refused(error(where))
    if url is None:
        raise Refused(error(f"Cache miss for image at index {index} but data is not provided."))
    if not url.startswith("data:"):
        message = "Cannot load local files without `--allowed-local-media-path`."
        raise Refused(error(message, status=500, kind="InternalServerError"))
    try:
        picture = base64.b64decode(url.partition(",")[2], validate=True)
    except binascii.Error:
        raise Refused(error("Failed to load image: Incorrect padding")) from None
    if name is not None:
        state.known_images[name] = picture
    return picture


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


def paused() -> WireResponse:
    """Return the 503 of a paused server of 0.33."""
    message = "Generation is paused. Please retry after it resumes."
    return error(message, status=503, kind="ServiceUnavailableError")


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
