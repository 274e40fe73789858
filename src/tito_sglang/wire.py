"""What an SGLang server speaks: `/generate` (SGLang 0.5.23), and how it streams.

Each event of a stream holds the whole answer so far, or with `--incremental-streaming-output` what is new.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tito_core.backend.http.bodies import BodyTooLargeError
from tito_core.backend.http.streaming import StreamError, go_on, same_echo
from tito_core.backend.optional_outputs import MOST_TOP_LOGPROBS, Capabilities
from tito_core.backend.protocol import NOTHING, RawScores, TokenRequest
from tito_core.backend.sampling import SamplingParams


class FinishReason(msgspec.Struct):
    """`meta_info.finish_reason`."""

    type: str
    matched: int | str | None = None
    message: str | None = None


class WeightVersions(msgspec.Struct):
    """One entry of `meta_info.weight_versions`: output tokens `start` to `end` came from `version`."""

    version: str
    start: int
    end: int


class Entry(msgspec.Struct, array_like=True, gc=False):
    """One entry of a list of logprobs: `[logprob, id, text]`; `text` is null, since no text is asked for.

    Hundreds come with an answer. The garbage collector does not count them, which it would begin its rounds for.
    """

    logprob: float | None
    token: int


class MetaInfo(msgspec.Struct):
    """`meta_info`. An abort in the queue lacks `prompt_tokens` and `cached_tokens`."""

    id: str
    finish_reason: FinishReason | None
    completion_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    weight_versions: list[WeightVersions] = []
    output_token_logprobs: list[Entry] | None = None
    input_token_logprobs: list[Entry] | None = None
    output_top_logprobs: list[list[Entry]] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    routed_experts: str | None = None


class Generation(msgspec.Struct):
    """The answer of `/generate`."""

    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: msgspec.Raw = NOTHING


class ModelInfo(msgspec.Struct):
    """`/model_info`."""

    weight_version: str | None = None


class Load(msgspec.Struct):
    """One worker of `/v1/loads`."""

    max_total_num_tokens: int | None = None


class Loads(msgspec.Struct):
    """`/v1/loads`, which also tells the server's version."""

    version: str | None = None
    loads: list[Load] = []


class ServerInfo(msgspec.Struct):
    """`/server_info`: of all launch arguments, those that open what a rollout may want."""

    enable_return_routed_experts: bool | None = None
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None
    sampling_mask_max_tokens: int | None = None


_SAFE_TOP_LOGPROBS = 1000
"""Fewer than any vocabulary has, where a server does not tell its own."""
_KEPT_BACK = 2
"""Tokens of the context that the scheduler keeps for itself: it ends a generation for length that much earlier."""


def usable_length(context_length: int | None, loads: Loads) -> int | None:
    """Return the tokens that prompt and completion can have together: context and key-value memory bound them."""
    bounds = [context_length, *(load.max_total_num_tokens for load in loads.loads)]
    known = [bound for bound in bounds if bound is not None]
    return min(known) - _KEPT_BACK if known else None


NO_TOKEN = 2**31 - 1
"""An id that no vocabulary has."""


def vocab_size_in(refusal: str) -> int | None:
    """Read the vocabulary's size out of "logit_bias must has keys in [0, 151935], got ..."; None from other words."""
    found = re.search(r"keys in \[0, (\d+)\]", refusal)
    return int(found[1]) + 1 if found else None


OPTIONS = {"routed_experts": "--enable-return-routed-experts", "priority": "--enable-priority-scheduling"}


def capabilities(server: ServerInfo | None, vocab_size: int | None) -> Capabilities:
    """Return what the server says it can. It takes any number of top logprobs, and dies of more than its vocabulary."""
    told = server or ServerInfo()
    return Capabilities(
        top_logprobs=min(MOST_TOP_LOGPROBS, vocab_size or _SAFE_TOP_LOGPROBS),
        routed_experts=told.enable_return_routed_experts,
        expert_shape=False,
        sampling_mask=None if server is None else told.sampling_mask_max_tokens is not None,
        priority=told.enable_priority_scheduling,
        lower_first=bool(told.schedule_low_priority_values_first),
        options=OPTIONS,
    )


def optional_request_fields(request: TokenRequest) -> dict[str, Any]:
    """Return the fields of optional outputs; the prefix cache is kept up to where the prompt is scored from.

    The first token from `logprob_start_len` on comes without a logprob, so it is the one before those that are wanted.
    """
    optional_outputs = request.optional_outputs
    fields: dict[str, Any] = {"logprob_start_len": request.first_scored - 1 if optional_outputs.prompt_logprobs else -1}
    if optional_outputs.top_logprobs:
        fields["top_logprobs_num"] = optional_outputs.top_logprobs
    if optional_outputs.routed_experts:
        fields |= {"return_routed_experts": True, "routed_experts_start_len": request.first_routed}
    if optional_outputs.sampling_mask:
        fields["return_sampling_mask"] = True
    return fields


def optional_response_fields(meta: MetaInfo, request: TokenRequest) -> dict[str, Any]:
    """Return what was wanted as fields of `RawResponse`; the token before the first scored one has no logprob."""
    top, prompt = meta.output_top_logprobs, meta.input_token_logprobs
    return {
        "top_logprobs": None if top is None else lambda: [_scored(row) for row in top],
        "prompt_logprobs": _scored(prompt[1:]) if prompt and request.optional_outputs.prompt_logprobs else None,
        "routed_experts": meta.routed_experts,
        "sampling_mask": meta.output_token_sampling_mask,
    }


def _scored(entries: list[Entry]) -> list[tuple[int, float | None]]:
    return [(entry.token, entry.logprob) for entry in entries]


def raw_scores(entries: list[Entry] | None, request_id: str) -> RawScores:
    """Return the scores of a prompt."""
    scored = entries or []
    logprobs, ids = [entry.logprob for entry in scored], [entry.token for entry in scored]
    return RawScores(logprobs=logprobs, token_ids=ids, request_id=request_id)


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return every sampling parameter under SGLang's names, so that no server default is left to apply.

    `no_stop_trim` and `skip_special_tokens` keep the text whole; ids and logprobs hold the stop token anyway.
    """
    fields: dict[str, Any] = {
        **sampling.shared_fields(),
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "no_stop_trim": True,
    }
    if sampling.seed is not None:
        fields["sampling_seed"] = sampling.seed
    if sampling.grammar is not None:
        fields[sampling.grammar.kind] = sampling.grammar.value
    return fields


_SAID_AGAIN = 1024
"""Ids and logprobs that an event may say once more for each of its new tokens."""


def stream_interval(request: TokenRequest) -> int:
    """Return the tokens an event shall bring: each repeats the prompt's echo, and all that was sampled before.

    Without it, streaming 1,000 tokens after a prompt of 32,000 would bring 32 million ids.
    """
    repeated = len(request.input_ids) + request.sampling.max_new_tokens // 2
    return 1 + repeated // _SAID_AGAIN


def stream_events(request: TokenRequest) -> int:
    """Return how many events an answer comes in, with some to spare."""
    return 8 + request.sampling.max_new_tokens // stream_interval(request)


class _Count(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    """What is read of every event; the rest is read of those that make the answer."""

    output_ids: list[int]
    meta_info: _Count
    prompt_token_ids: msgspec.Raw = NOTHING


class Events:
    """Puts one answer together. An event that is lost, comes twice or out of order shows in its count of tokens.

    Args:
        limit: Most bytes of the events that are kept, which hold the answer once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._length = 0
        self._ids: list[int] = []
        self._kept: list[bytes] = []
        self._echo = NOTHING

    def take(self, event: bytes) -> Sequence[int]:
        """See `Gathering.take`."""
        said, before = msgspec.json.decode(event, type=_Event), len(self._ids)
        self._echo = same_echo(self._echo, said.prompt_token_ids)
        count, ids = said.meta_info.completion_tokens, said.output_ids
        if len(ids) == count and ids[:before] == self._ids:  # all so far, which stands for the events before
            self._kept, self._length, new = [event], len(event), ids[before:]
        elif before and before + len(ids) == count:
            self._kept.append(event)
            self._length += len(event)
            if self._length > self._limit:
                raise BodyTooLargeError(self._limit)
            new = ids
        else:
            raise StreamError(
                f"an event of {len(ids)} ids counts {count}, after events that brought {before}; it neither repeats "
                "those nor goes on from them"
            )
        self._ids += new
        return new

    def whole(self) -> Generation:
        """See `Gathering.whole`."""
        if not self._kept:
            raise msgspec.DecodeError("it streamed no event")
        first, *more = (msgspec.json.decode(event, type=Generation) for event in self._kept)
        for event in more:
            go_on(first, event)
        return first
