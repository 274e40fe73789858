"""Requests to a scripted SGLang 0.5.23: parsed, checked in the server's order, and refused in its words.

Each kind of refusal has a body that was recorded; only values that a client reads are filled in.
"""

from __future__ import annotations

import base64
import binascii
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgspec

from tito_conformance.testing.pictures import BadImage, ImageSettings, PlacedImage, place
from tito_conformance.testing.script import ScriptedRequest
from tito_conformance.testing.sglang_answers import GenerateAnswer
from tito_conformance.testing.wire import (
    EngineState,
    Generation,
    Refused,
    WireResponse,
    json_response,
    random_id,
    scripted_request,
)

_MAX_NEW_TOKENS = 128  # the server's default
SAMPLING_MASK_TOKENS = 4096  # the server's default --sampling-mask-max-tokens
_RESERVED = 6  # tokens of the context that a prompt must leave free
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_INTEGERS = ("max_new_tokens", "top_k", "min_new_tokens", "n", "sampling_seed", "stream_interval")
_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_TEXTS = ("stop", "stop_token_ids", "stop_regex", "ignore_eos", "skip_special_tokens", "no_stop_trim", "watermark")
_OTHERS = ("spaces_between_special_tokens", "logit_bias", "custom_params", "beam_width", "choice")
FIELDS = (*_INTEGERS, *_FLOATS, *GRAMMARS, *_TEXTS, *_OTHERS)
"""The server's sampling fields."""


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
    check_contract(shared, input_ids)
    batch = bool(input_ids) and isinstance(input_ids[0], list)
    prompts: list[list[int]] = input_ids if batch else [input_ids]
    many = batch or (shared.get("n") or 1) > 1
    rids = _rids(state, body, len(prompts), shared.get("n") or 1, batch)
    requests = []
    for index, ids in enumerate(prompts):
        own = params[index] if isinstance(params, list) else shared
        check_contract(own, None)
        placed: tuple[PlacedImage, ...] = ()
        if ids and not batch:
            expanded, placed = expand(state, body, ids)
            ids = list(expanded)
        _check(state, body, own, ids, batch)
        for sample in range(own.get("n") or 1):
            rid = rids[index * (own.get("n") or 1) + sample]
            one = _scripted(state, body, own, tuple(ids), rid, sample)
            requests.append(replace(one, path=path, headers=headers, images=placed))
    return Generation(requests, GenerateAnswer(state, body, many), bool(body.get("stream")))


class Rejected(Exception):
    """The engine refuses the request: a 400 with `{"error": {"message"}}`, or an event of a stream."""


class SchedulerRejected(Rejected):
    """The scheduler refuses the request after the HTTP layer accepted it: in a stream, by an aborted answer."""


class Killed(Exception):
    """The request crashes the server: the connection closes without a response, and the server stops listening."""


def _decoded(headers: Mapping[str, str], raw: bytes) -> dict[str, Any]:
    if not raw:
        raise Refused(no_body())
    if "json" not in headers.get("content-type", "application/json"):
        raise Refused(no_object(raw))
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        raise Refused(malformed_json(raw)) from None
    if not isinstance(body, dict):
        raise Refused(no_object(body))
    return body


def _check_shape(input_ids: Any, params: Any) -> None:
    """Check the types of `input_ids` and `sampling_params` against the schema."""
    if input_ids is not None and not isinstance(input_ids, list):
        words = f"must be list or null; got {type(input_ids).__name__}"
        raise Refused(bad_input_ids(input_ids, words))
    strange = set(map(type, input_ids or ())) - {int, list, bool}
    if strange:
        raise Refused(bad_input_ids(input_ids, f"elements must be int or list; got {strange.pop().__name__}"))
    if params is not None and not isinstance(params, dict | list):
        raise Refused(bad_sampling_params(params))


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
    rank = body.get("routed_dp_rank")
    if rank is not None and not 0 <= rank < state.ranks:
        raise Rejected(f"routed_dp_rank={rank} out of range [0, {state.ranks})")
    adapter = body.get("lora_path")
    if adapter is not None and adapter not in state.adapters:
        raise Rejected(f"The following requested LoRA adapters are not loaded: {adapter}")
    check_values(params, state.vocab_size)
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
    if state.skip_tokenizer_init and any(params.get(name) is not None for name in GRAMMARS):
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
    seed = params.get("sampling_seed")
    grammar = {name: params[name] for name in GRAMMARS if params.get(name) is not None}
    limit = _max_new_tokens(params, min(_MAX_NEW_TOKENS, state.max_model_len - len(ids)))
    return scripted_request(
        state,
        body,
        params,
        ids,
        wire="sglang",
        max_new_tokens=limit,
        seed=None if seed is None else seed + sample,
        stop_regex=_patterns(params),
        min_new_tokens=params.get("min_new_tokens") or 0,
        grammar=grammar or None,
        reported_temperature=1.0 if state.raw_logprobs is True else params.get("temperature") or 1.0,
        reported_offsets=True,
        scoring=bool(body.get("return_logprob")) and (body.get("logprob_start_len") or -1) >= 0 and limit <= 1,
        request_id=rid,
        server_id=rid,
        adapter=body.get("lora_path"),
    )


_RANGES = (
    ("temperature", 0, sys.float_info.max, "a non-negative finite number"),
    ("top_p", 5e-324, 1, "in (0, 1]"),
    ("min_p", 0, 1, "in [0, 1]"),
    ("frequency_penalty", -2, 2, "in [-2, 2]"),
    ("presence_penalty", -2, 2, "in [-2, 2]"),
    ("max_new_tokens", 0, sys.maxsize, "at least 0"),
)


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


def expand(
    state: EngineState, body: Mapping[str, Any], ids: Sequence[int]
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    """Return the prompt as the server reads it, and its images. A text model's server ignores images.

    With fewer placeholders than images the server decodes the prompt and encodes it again, so that text which spells a
    placeholder becomes one; images without a placeholder are then dropped.

    Raises:
        Refused: A 500.
        Rejected: A 400, or an error event of a stream.
        Killed: The request crashes the server.
    """
    found, settings = body.get("image_data"), state.images
    if found is None or settings is None:
        return tuple(ids), ()
    if body.get("mm_hashes"):
        raise Killed  # measured with a picture that the server had not seen
    given = found if isinstance(found, list) else [found]
    hashes = body.get("mm_content_hashes") or [None] * len(given)
    if len(hashes) != len(given):
        raise Rejected(f"mm_content_hashes has {len(hashes)} entries for {len(given)} images")
    pictures = [_picture(index, one, known) for index, (one, known) in enumerate(zip(given, hashes, strict=True))]
    try:
        return _placed(state, settings, ids, pictures)
    except BadImage as bad:
        raise Rejected(f"Could not decode image: {bad}".replace("object>", "object at 0x7f60f4716ed0>")) from None


def _placed(
    state: EngineState, settings: ImageSettings, ids: Sequence[int], pictures: Sequence[bytes]
) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
    count = sum(token == settings.placeholder for token in ids)
    if state.encode is not None and (settings.decodes or count < len(pictures)):
        ids = state.encode(state.decode(ids), False)
        count = sum(token == settings.placeholder for token in ids)
        if settings.decodes and count > len(pictures):
            raise Rejected(f"Prompt has {count} image placeholders but {len(pictures)} image inputs were provided")
    if count > len(pictures):
        raise Refused(_BROKEN)
    return place(ids, pictures, settings)


def _picture(index: int, given: Any, known: str | None) -> bytes:
    """Return a picture; its content hash, if given, must be that of its bytes."""
    url = given["url"] if isinstance(given, dict) else given
    try:
        picture = base64.b64decode(url.partition(",")[2], validate=True)
    except binascii.Error:
        raise Rejected("Could not decode image: Incorrect padding") from None
    own = f"sha256:{sha256(picture).hexdigest()}"
    if known is not None and known != own:
        raise Rejected(f"content hash mismatch for media_data[{index}]: expected {known}, got {own}")
    return picture


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
_BROKEN = WireResponse(500, {"content-type": "text/plain; charset=utf-8"}, b"Internal Server Error")
