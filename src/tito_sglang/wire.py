"""Request and response bodies of an SGLang server (0.5.23): `/generate` and its information endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from tito_core.backend.errors import BadRequestError, ProtocolViolationError, UnsupportedByServerError
from tito_core.backend.http.body import BodyTooLargeError
from tito_core.backend.http.streaming import FailedAnswerError, StreamError, merged, same_echo, same_request
from tito_core.backend.images import ImageSupport, data_url_json
from tito_core.backend.protocol import (
    MOST_TOP_LOGPROBS,
    NOTHING,
    Capabilities,
    EngineInfo,
    OnChunk,
    RawScores,
    TokenRequest,
)
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.turn import Adapter, Image


class FinishReason(msgspec.Struct):
    """`meta_info.finish_reason`; in a stream an error is an abort with a `status_code`."""

    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class WeightVersionSpan(msgspec.Struct):
    """One entry of `meta_info.weight_versions`: output tokens `start` to `end` came from `version`."""

    version: str
    start: int
    end: int


class LogprobEntry(msgspec.Struct, array_like=True, gc=False):
    """One entry of a list of logprobs: `[logprob, id, text]`; `text` is null, as it is not requested.

    Not tracked by the garbage collector, as the hundreds of entries of an answer would trigger collections.
    """

    logprob: float | None
    token: int


class MetaInfo(msgspec.Struct):
    """`meta_info`. A request aborted in the queue has no `prompt_tokens` and `cached_tokens`."""

    finish_reason: FinishReason | None
    completion_tokens: int
    id: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    weight_versions: list[WeightVersionSpan] = []
    output_token_logprobs: list[LogprobEntry] | None = None
    input_token_logprobs: list[LogprobEntry] | None = None
    input_token_ids_logprobs: list[list[LogprobEntry] | None] | None = None
    output_top_logprobs: list[list[LogprobEntry]] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    routed_experts: str | None = None
    num_retractions: int = 0
    image_tokens: int | None = None


class Generation(msgspec.Struct):
    """Response of `/generate`."""

    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: msgspec.Raw = NOTHING


class ModelInfo(msgspec.Struct):
    """`/model_info`. `preferred_sampling_params` fill in the fields that a request leaves out."""

    weight_version: str | None = None
    has_image_understanding: bool = False
    model_type: str | None = None
    preferred_sampling_params: dict[str, Any] | str | None = None

    def __post_init__(self) -> None:
        """Decode what some releases write as a text."""
        if isinstance(text := self.preferred_sampling_params, str):
            self.preferred_sampling_params = msgspec.json.decode(text, type=dict[str, Any] | None)


class Load(msgspec.Struct):
    """One worker of `/v1/loads`."""

    max_total_num_tokens: int | None = None


class Loads(msgspec.Struct):
    """`/v1/loads`, which includes the server's version."""

    version: str | None = None
    loads: list[Load] = []


class ServerInfo(msgspec.Struct):
    """`/server_info`: launch arguments. `served_model_name` stays, where `/v1/models` has the folder of new weights."""

    enable_return_routed_experts: bool | None = None
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None
    sampling_mask_max_tokens: int | None = None
    limit_mm_data_per_request: dict[str, int] | None = None
    mm_preprocess_cache_size_mb: int | None = None
    dp_size: int | None = None
    served_model_name: str | None = None


_SAFE_TOP_LOGPROBS = 1000
"""Limit of top logprobs if the vocabulary size is unknown; below that of any model."""
_RESERVED = 6
"""Tokens of the context that a prompt must leave free (`validate_input_length` of SGLang 0.5.23).

An answer may use four of them. They are not counted, so that an answer that is aborted anywhere can be resumed.
"""


def usable_length(context_length: int | None, loads: Loads) -> int | None:
    """Return the maximum length of prompt and completion together, limited by the context and the key-value memory."""
    bounds = [context_length, *(load.max_total_num_tokens for load in loads.loads)]
    known = [bound for bound in bounds if bound is not None]
    return min(known) - _RESERVED if known else None


INVALID_ID = 2**31 - 1
"""An id outside any vocabulary."""
PROBE: dict[str, Any] = {
    "input_ids": [0],
    "sampling_params": {"max_new_tokens": 1, "logit_bias": {str(INVALID_ID): 0.0}},
    "return_prompt_token_ids": True,
    "return_logprob": True,
    "logprob_start_len": 0,
}
"""A request that every server refuses."""


class Route(msgspec.Struct, frozen=True):
    """What reaches the server of a request.

    Attributes:
        rebuilds: A router builds requests anew from the fields that it knows, and drops the others: a `logit_bias`, a
            `structural_tag`, patterns of stop strings, a `stream_interval` (sglang-router 0.3.2, smg 1.13.0).
        echoes: Answers echo the prompt. Where a router drops that too, the ids beside the prompt's logprobs prove it.
    """

    rebuilds: bool = False
    echoes: bool = True


DIRECT = Route()


def route_of(answer: Generation, where: str) -> Route:
    """Return the route of requests from the answer to `PROBE`, which a server would have refused.

    Raises:
        UnsupportedByServerError: It shows no id of the prompt.
    """
    if answer.prompt_token_ids == NOTHING and not answer.meta_info.input_token_logprobs:
        raise UnsupportedByServerError(
            f"The router at {where} drops return_prompt_token_ids and logprob_start_len from requests, so nothing "
            "proves which prompt the server read (law 4). Use smg, which passes both on, sglang-router, which passes "
            "the second, or the server's own address.",
            backend="sglang",
        )
    return Route(True, answer.prompt_token_ids != NOTHING)


def refuse_dropped(request: TokenRequest, route: Route) -> None:
    """Check that a request has no field without which its answer would be another one, and which the router drops.

    Raises:
        UnsupportedByServerError: It has one.
    """
    grammar, lost = request.sampling.grammar, [*request.sampling.extra]
    if grammar is not None and grammar.kind == "structural_tag":
        lost.append("the grammar of a forced tool call (structural_tag)")
    if request.optional_outputs.cache_salt is not None and not route.echoes:
        lost.append("cache_salt")
    if lost:
        raise UnsupportedByServerError(
            f"The router before the server drops {', '.join(lost)} from requests, so this one was not sent. Leave it "
            "out, or use the server's own address.",
            backend="sglang",
            request_id=request.request_id,
        )


def vocab_size_in(refusal: str) -> int | None:
    """Return the size of the vocabulary in "logit_bias must has keys in [0, 151935], got ..."; else None."""
    found = re.search(r"keys in \[0, (\d+)\]", refusal)
    return int(found[1]) + 1 if found else None


OPTIONS = {"routed_experts": "--enable-return-routed-experts", "priority": "--enable-priority-scheduling"}


def capabilities(server: ServerInfo | None, vocab_size: int | None) -> Capabilities:
    """Return the server's capabilities. More top logprobs than its vocabulary would crash it."""
    info = server or ServerInfo()
    return Capabilities(
        top_logprobs=min(MOST_TOP_LOGPROBS, vocab_size or _SAFE_TOP_LOGPROBS),
        routed_experts=info.enable_return_routed_experts,
        expert_shape=False,
        sampling_mask=None if server is None else info.sampling_mask_max_tokens is not None,
        priority=info.enable_priority_scheduling,
        lower_first=bool(info.schedule_low_priority_values_first),
        adapters=True,  # a name that is not loaded is refused
        options=OPTIONS,
    )


_KEEPS_IDS = ("qwen3_vl", "qwen3_vl_moe")
"""Model types whose image processor reads token ids in every mode (0.5.23)."""
_KEEPS_IDS_CACHED = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe")
"""Those that read token ids with `--mm-preprocess-cache-size-mb` only."""


def image_support(model: ModelInfo | None, server: ServerInfo | None, route: Route = DIRECT) -> ImageSupport:
    """Return whether the server takes images, and how many in one request.

    A server that decodes a request's ids to text and encodes that again could take text for an image (law 6): it counts
    as one that takes none, and so does one of which this is not known.
    """
    if model is None or not model.has_image_understanding:
        return ImageSupport(remedy="Serve a model that takes images.")
    if not route.echoes:
        return ImageSupport(remedy="The router drops return_prompt_token_ids: use smg, or the server's own address.")
    info, kind = server or ServerInfo(), model.model_type
    if kind not in (*_KEEPS_IDS, *_KEEPS_IDS_CACHED):
        return ImageSupport(
            remedy=f"It is not known to keep the token ids of a prompt with images for models of type {kind}, only for "
            f"{', '.join((*_KEEPS_IDS, *_KEEPS_IDS_CACHED))}. Serve one of these, or use another engine."
        )
    if kind in _KEEPS_IDS_CACHED and not info.mm_preprocess_cache_size_mb:
        why = f"With images, it decodes a prompt of {kind} to text and encodes that again."
        if server is None:
            why = f"With images, it may decode a prompt of {kind} to text, and its /server_info does not tell."
        return ImageSupport(remedy=f"{why} Start it with --mm-preprocess-cache-size-mb 64, which keeps the ids.")
    return ImageSupport(True, (info.limit_mm_data_per_request or {}).get("image"))


def image_fields(images: Sequence[Image]) -> dict[str, Any]:
    """Return the fields of images. The server compares each hash with the data, and caches features by it.

    `mm_hashes` is never sent: with an image that it has not seen, 0.5.23 dies.
    """
    return {
        "image_data": [data_url_json(image) for image in images],
        "mm_content_hashes": [f"sha256:{image.sha256.hex()}" for image in images],
    }


def adapter_fields(adapter: Adapter | None) -> dict[str, Any]:
    """Return the field that names an adapter; the answer does not repeat it."""
    return {} if adapter is None else {"lora_path": adapter.name}


def generation_fields(
    info: EngineInfo, request: TokenRequest, on_chunk: OnChunk | None, route: Route = DIRECT
) -> dict[str, Any]:
    """Return the fields of `/generate`, without the prompt's ids."""
    if route.rebuilds:
        refuse_dropped(request, route)
    fields: dict[str, Any] = {
        "sampling_params": sampling_fields(request.sampling),
        **optional_request_fields(request, route),
        **info.capabilities.service_fields(request.optional_outputs),
        "return_prompt_token_ids": request.echo,
        "stream": on_chunk is not None,
    }
    if request.images is not None:
        fields |= image_fields(request.images.images)
    if request.adapter is not None:
        fields |= adapter_fields(request.adapter)
    if on_chunk is not None:
        fields["sampling_params"]["stream_interval"] = stream_interval(request)
    return fields


def optional_request_fields(request: TokenRequest, route: Route = DIRECT) -> dict[str, Any]:
    """Return the request fields of optional outputs, and of the prompt's logprobs where their ids stand for the echo.

    The server uses its prefix cache only up to `logprob_start_len`. The token at that offset has no logprob, so it is
    the one before the first scored token.
    """
    optional_outputs = request.optional_outputs
    scored = optional_outputs.prompt_logprobs or (request.echo and not route.echoes)
    fields: dict[str, Any] = {"logprob_start_len": request.first_scored - 1 if scored else -1}
    if optional_outputs.prompt_logprobs:
        fields["token_ids_logprob"] = request.input_ids[-1:].tolist()  # see `check_own`
    if optional_outputs.top_logprobs:
        fields["top_logprobs_num"] = optional_outputs.top_logprobs
    if optional_outputs.routed_experts:
        fields |= {"return_routed_experts": True, "routed_experts_start_len": request.first_routed}
    if optional_outputs.sampling_mask:
        fields["return_sampling_mask"] = True
    return fields


def reported(
    answer: Generation,
    request: TokenRequest,
    sent: str,
    vocab_size: int | None,
    route: Route = DIRECT,
    *,
    unordered: bool = False,
) -> dict[str, Any]:
    """Return an answer as fields of `RawResponse`, without the prompt entry that has no logprob.

    Args:
        answer: The answer.
        request: The request.
        sent: The id that was sent.
        vocab_size: The server's; None if unknown.
        route: What reached the server of the request.
        unordered: See `RawResponse.unordered`.
    """
    meta = answer.meta_info
    reason, entries = meta.finish_reason, meta.output_token_logprobs
    top, prompt, echoed_from = meta.output_top_logprobs, None, 0
    echoed: list[int] | msgspec.Raw = answer.prompt_token_ids
    if meta.input_token_logprobs and (request.optional_outputs.prompt_logprobs or not route.echoes):
        scored = scored_prompt(meta, request.input_ids, vocab_size)
        if request.optional_outputs.prompt_logprobs:
            check_own(meta, scored)
            prompt = scored[1:]
        if not route.echoes and echoed == NOTHING:  # a router may begin to pass the echo on
            echoed, echoed_from = [token for token, _ in scored], request.first_scored - 1
    return {
        "finish": None if reason is None else reason.type,
        "stop": None if reason is None else reason.matched,
        "output_ids": answer.output_ids,
        "logprobs": None if entries is None else [entry.logprob for entry in entries],
        "logprob_ids": [entry.token for entry in entries or ()],
        "echoed": echoed,
        "echoed_from": echoed_from,
        "prompt_tokens": meta.prompt_tokens,
        "completion_tokens": meta.completion_tokens,
        "cached_tokens": meta.cached_tokens,
        "image_tokens": meta.image_tokens,
        "versions": [(span.start, span.end, span.version) for span in meta.weight_versions],
        "message": None if reason is None else reason.message,
        "request_id": sent,
        "response_id": meta.id,
        "unordered": unordered,
        "top_logprobs": None if top is None else lambda: [_scored(row) for row in top],
        "prompt_logprobs": prompt,
        "routed_experts": meta.routed_experts,
        "sampling_mask": meta.output_token_sampling_mask,
        "recomputed": meta.num_retractions > 0,
    }


def _scored(entries: list[LogprobEntry]) -> list[tuple[int, float | None]]:
    return [(entry.token, entry.logprob) for entry in entries]


def scored_prompt(meta: MetaInfo, ids: TokenIds, vocab_size: int | None) -> list[tuple[int, float | None]]:
    """Return (id, logprob) of each scored token of a prompt, as the server reports them but for one id.

    The server reports every id from `vocab_size - 1` on as 0 (0.5.23): it means the stand-ins of pictures, which are
    outside the vocabulary, and takes the vocabulary's last id with them. The logprob is that of the id that was sent.

    Args:
        meta: The answer's.
        ids: int32, shape (n,): the prompt, or its end from before the first scored token on. Where it is collapsed, a
            last id before a new image is not found, and its 0 is refused.
        vocab_size: The server's; None if unknown.
    """
    scored, last = _scored(meta.input_token_logprobs or []), (vocab_size or 0) - 1
    for back in (np.flatnonzero(ids[::-1] == last) + 1).tolist():
        if back <= len(scored) and scored[-back][0] == 0:
            scored[-back] = (last, scored[-back][1])
    return scored


SAME = 1e-2
"""Most nats between two reports of one logprob: the server takes both from one array."""


def check_own(meta: MetaInfo, scored: list[tuple[int, float | None]]) -> None:
    """Check that the scores are this request's: those of the ids that were asked for besides agree with them.

    The server cuts `input_token_logprobs` from the array of its batch, by a count that leaves out the rows of a request
    that was retracted meanwhile (0.5.23, sglang #36938): the rows are then another request's, beside the right ids.
    The scores of given ids are kept by request. Seen on the server: 4 of 50 scores were up to 3.2 nats off.

    Raises:
        ProtocolViolationError: They differ.
    """
    for offset, ((token, score), row) in enumerate(zip(scored, meta.input_token_ids_logprobs or [], strict=False)):
        again = next((entry.logprob for entry in row or () if entry.token == token), None)
        if score is not None and again is not None and abs(score - again) > SAME:
            raise ProtocolViolationError(
                f"Law 4: the score of id {token} at offset {offset} is {score}, and among the given ids {again}: the "
                "scores are another request's, as SGLang mixes them up when it retracts a request. Run it again, with "
                "fewer requests at once or more key-value memory (--mem-fraction-static).",
                backend="sglang",
                request_id=meta.id,
            )


def raw_scores(meta: MetaInfo, scored: list[tuple[int, float | None]], sent: str) -> RawScores:
    """Return the scores of a prompt."""
    logprobs, ids = [logprob for _, logprob in scored], [token for token, _ in scored]
    of_ids = [_scored(row or []) for row in (meta.input_token_ids_logprobs or [])[1:]]
    return RawScores(logprobs=logprobs, token_ids=ids, request_id=sent, response_id=meta.id, of_ids=of_ids)


EXTRA_FIELDS = frozenset(("logit_bias", "stop_regex", "stream_interval"))
"""Fields that `SamplingParams.extra` may have (0.5.23). They ban tokens, end an answer or concern only its stream."""


NEUTRAL: dict[str, Any] = {
    "n": 1,
    **dict.fromkeys(("sampling_seed", "logit_bias", "stop_regex", "custom_params")),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag")),
}
"""Fields that most requests do not use. They are sent, as `--preferred-sampling-params` fills in those left out."""


def refuse_preferred(preferred: Iterable[str]) -> None:
    """Check the names in the server's `--preferred-sampling-params`.

    Raises:
        BadRequestError: It has a field that requests do not send, which would change answers and not be recorded.
    """
    sent = sampling_fields(SamplingParams())
    if more := sorted(set(preferred) - sent.keys() - {"stream_interval"}):
        raise BadRequestError(
            f"The server adds {', '.join(more)} to every request (--preferred-sampling-params), which would change "
            "answers and not be recorded. Start it without, and set sampling parameters in the client.",
            backend="sglang",
        )


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return all sampling parameters under SGLang's names, so that no server default applies.

    `no_stop_trim` and `skip_special_tokens` concern only the text; ids and logprobs always include the stop token.
    """
    fields: dict[str, Any] = {
        **NEUTRAL,
        **sampling.shared_fields(),
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "no_stop_trim": True,
        "sampling_seed": sampling.seed,
    }
    if sampling.grammar is not None:
        fields[sampling.grammar.kind] = sampling.grammar.value
    return fields


_REPEATED = 1024
"""Maximum number of ids and logprobs that an event may repeat per new token."""


def stream_interval(request: TokenRequest) -> int:
    """Return the number of new tokens per event, or the user's if that is larger.

    Each event repeats the prompt's echo and all earlier tokens.

    With one token per event, streaming 1,000 tokens after a prompt of 32,000 would transfer 32 million ids.
    """
    repeated = request.least_length + request.sampling.max_new_tokens // 2
    given = request.sampling.extra.get("stream_interval")
    return max(1 + repeated // _REPEATED, given if isinstance(given, int) else 1)


def stream_events(request: TokenRequest, route: Route = DIRECT) -> int:
    """Return an upper bound on the number of events."""
    return 8 + request.sampling.max_new_tokens // (1 if route.rebuilds else stream_interval(request))


class _Meta(msgspec.Struct):
    completion_tokens: int
    id: str | None = None
    prompt_tokens: int | None = None
    finish_reason: FinishReason | None = None


class _Event(msgspec.Struct):
    """The fields that are decoded of every event; the others are decoded only of events that are kept."""

    output_ids: list[int]
    meta_info: _Meta
    prompt_token_ids: msgspec.Raw = NOTHING


class _AbortMeta(msgspec.Struct):
    finish_reason: FinishReason
    weight_versions: list[WeightVersionSpan] = []


class _Abort(msgspec.Struct):
    """The end of a request that was aborted while it waited again."""

    meta_info: _AbortMeta


class EventAssembler:
    """Assembles one response. The count of tokens in each event reveals lost, duplicated and reordered events.

    Each event holds the whole answer so far, or with `--incremental-streaming-output` only new tokens.
    A request that is aborted while it waits again after a retraction ends, in both modes, with an event that holds only
    its last token again, the count of all, and neither prompt nor usage (`_handle_abort_req` of 0.5.23).

    Args:
        limit: Maximum number of bytes of the kept events, which hold the answer once.
    """

    unordered = False

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._length = 0
        self._ids: list[int] = []
        self._kept: list[bytes] = []
        self._echo = NOTHING
        self._id: str | None = None
        self._abort: _Abort | None = None

    def add(self, event: bytes) -> Sequence[int]:
        """See `StreamAssembler.add`."""
        decoded, before = msgspec.json.decode(event, type=_Event), len(self._ids)
        reason = decoded.meta_info.finish_reason
        if reason is not None and reason.status_code is not None:
            raise FailedAnswerError(reason.status_code, reason.message or "")
        self._echo = same_echo(self._echo, decoded.prompt_token_ids)
        self._id = same_request(self._id, decoded.meta_info.id)
        if self._abort is not None:
            raise StreamError("an event follows the one that aborted the answer")
        count, ids = decoded.meta_info.completion_tokens, decoded.output_ids
        aborted = reason is not None and reason.type == "abort"
        repeats = before and count == before and ids == self._ids[-1:]
        if aborted and repeats and (before > 1 or decoded.meta_info.prompt_tokens is None):
            self._abort = msgspec.json.decode(event, type=_Abort)
            return []
        if len(ids) == count and ids[:before] == self._ids:  # cumulative: it replaces the events before
            self._kept, self._length, new = [event], len(event), ids[before:]
        elif before and before + len(ids) == count:
            self._kept.append(event)
            self._length += len(event)
            if self._length > self._limit:
                raise BodyTooLargeError(self._limit)
            new = ids
        else:
            raise StreamError(
                f"an event of {len(ids)} ids reports {count} tokens after {before} earlier ones: it neither "
                "repeats nor continues them"
            )
        self._ids += new
        return new

    def result(self) -> Generation:
        """See `StreamAssembler.result`."""
        if not self._kept:
            raise msgspec.DecodeError("the stream had no event")
        answer = merged([msgspec.json.decode(event, type=Generation) for event in self._kept])
        if self._abort is not None:
            meta = self._abort.meta_info
            answer.meta_info.finish_reason, answer.meta_info.weight_versions = meta.finish_reason, meta.weight_versions
        return answer
