"""Requests of SGLang's `/generate`: a JSON body in, a validated `Generation` out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from strands_tito.testing.images import PlacedImage
from strands_tito.testing.script import ScriptedRequest
from strands_tito.testing.wire import EngineState, Generation, random_id
from tito_sglang.scripted import errors, images
from tito_sglang.scripted.errors import Killed, Refused, Rejected, SchedulerRejected
from tito_sglang.scripted.generate import GenerateAnswer

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
