"""Request and response bodies of a vLLM server: `/inference/v1/generate`, and `/v1/completions` with token ids.

Measured with 0.30 to 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from tito_core.backend.errors import BadRequestError
from tito_core.backend.http.streaming import StreamError, merged, same_request
from tito_core.backend.images import ImageSupport, data_url_json
from tito_core.backend.protocol import (
    NOTHING,
    Capabilities,
    EngineInfo,
    OnChunk,
    OptionalOutputs,
    RawScores,
    ScoredTokens,
    TokenRequest,
)
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.turn import Adapter, Image


class Logprobs(msgspec.Struct):
    """`choices[].logprobs`; `top_logprobs` are decoded only if requested.

    `tokens` are "token_id:N", as `return_tokens_as_token_ids` is sent; `text_offset` counts their characters.
    """

    token_logprobs: list[float | None]
    tokens: list[str]
    text_offset: list[int] = []
    top_logprobs: list[msgspec.Raw] | None = None

    def top(self) -> list[ScoredTokens]:
        """Decode the top tokens at each position, and the sampled token."""
        rows = (msgspec.json.decode(row, type=dict[str, float | None] | None) for row in self.top_logprobs or ())
        return [[(token_of(text), logprob) for text, logprob in (row or {}).items()] for row in rows]


class PromptLogprob(msgspec.Struct, gc=False):
    """One entry of `prompt_logprobs`, keyed by the token id; the prompt's own token is the first.

    Not tracked by the garbage collector, as the hundreds of entries of an answer would trigger collections.
    """

    logprob: float


PromptLogprobs = list[dict[int, PromptLogprob] | None] | None
"""One entry per prompt token, null for the first."""


class Choice(msgspec.Struct):
    """`choices[]`."""

    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = NOTHING
    logprobs: Logprobs | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class PromptDetails(msgspec.Struct):
    """`usage.prompt_tokens_details`, present with `--enable-prompt-tokens-details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class Completion(msgspec.Struct):
    """Response of `/v1/completions`; in a stream only the last event has the fingerprint, of version and settings."""

    choices: list[Choice]
    id: str | None = None
    model: str | None = None
    system_fingerprint: str | None = None
    usage: Usage | None = None


class TokenLogprob(msgspec.Struct, gc=False):
    """One entry of `logprobs.content` of `/inference/v1/generate`; up to 0.31 the id is in `token`, "token_id:N"."""

    logprob: float | None
    token_id: int | None = None
    token: str = ""
    top_logprobs: msgspec.Raw = NOTHING

    def top(self) -> ScoredTokens:
        """Decode the top tokens at this position, and the sampled token."""
        entries = msgspec.json.decode(self.top_logprobs, type=list[TokenLogprob] | None)
        return list(zip(ids_of(entries or ()), [entry.logprob for entry in entries or ()], strict=True))


class ContentLogprobs(msgspec.Struct):
    """`choices[].logprobs` of `/inference/v1/generate`."""

    content: list[TokenLogprob]

    def top(self) -> list[ScoredTokens]:
        """Decode the top tokens at each position, and the sampled token."""
        return [entry.top() for entry in self.content]


class WeightVersionSpan(msgspec.Struct):
    """One entry of `weight_versions` (from 0.32): output tokens `start` to `end` came from `version`."""

    version: str
    start: int
    end: int


class Generated(msgspec.Struct):
    """`choices[]` of `/inference/v1/generate`; no `stop_reason` up to 0.31."""

    finish_reason: str | None
    token_ids: list[int] | None = None
    logprobs: ContentLogprobs | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    weight_versions: list[WeightVersionSpan] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class PlaceholderRange(msgspec.Struct):
    """One entry of `mm_placeholders`: where an image's placeholders stand in the prompt."""

    offset: int
    length: int


class Placeholders(msgspec.Struct):
    """`mm_placeholders`; null for a prompt of text."""

    image: list[PlaceholderRange] | None = None


class Generation(msgspec.Struct):
    """Response of `/inference/v1/generate`; no `mm_placeholders` in older versions, no `model` in a stream."""

    choices: list[Generated]
    request_id: str | None = None
    model: str | None = None
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = NOTHING
    prompt_logprobs: PromptLogprobs = None
    prompt_token_id_logprobs: str | None = None
    mm_placeholders: Placeholders | None = None


class TextChoice(msgspec.Struct):
    """`choices[]` of `/v1/completions`, as the probe of grammars reads it."""

    text: str | None = None


class TextCompletion(msgspec.Struct):
    """Response of `/v1/completions` to that probe."""

    choices: list[TextChoice]


class WeightInfo(msgspec.Struct):
    """`/weight_info`, in development mode."""

    weight_version: str | None = None


class Version(msgspec.Struct):
    """`/version`."""

    version: str | None = None


EXTRA_FIELDS = frozenset(
    ("logit_bias", "bad_words", "include_stop_str_in_output", "stream_interval", "repetition_detection")
)
"""Fields that `SamplingParams.extra` may have (0.32). They ban tokens, end an answer or concern only its text."""
_GRAMMAR_FIELD = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return all sampling parameters under vLLM's names, so that no server default applies.

    Raises:
        BadRequestError: A regular expression ends the answer, which vLLM would ignore.
    """
    if sampling.stop_patterns:
        raise BadRequestError("vLLM has no stop_regex: end answers with `stop` or `stop_token_ids`.", backend="vllm")
    fields: dict[str, Any] = {
        **sampling.shared_fields(),
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "seed": sampling.seed,
    }
    if sampling.grammar is not None:
        fields["structured_outputs"] = {_GRAMMAR_FIELD[sampling.grammar.kind]: sampling.grammar.value}
    return fields


OPTIONS = {
    "top_logprobs": "--max-logprobs",
    "routed_experts": "--enable-return-routed-experts",
    "sampling_mask": "--enable-scale-out --return-sampling-mask --logprobs-mode processed_logprobs",
    "priority": "--scheduling-policy priority",
    "grammar": "--enable-scale-out",
}
TOO_MANY_LOGPROBS = 2**31 - 1
"""Above the limit of any server, which then reports its limit."""


def capabilities(refusal: str, *, one_more: bool, grammar: bool | None) -> Capabilities:
    """Read the limit from a refusal like "... greater than max allowed: 20 ..."; `one_more`: see below."""
    found = re.search(r"max allowed: (\d+)", refusal)
    most = None if found is None else max(int(found[1]) - one_more, 0)
    mask = None if one_more else False  # `/v1/completions` has no field for it
    return Capabilities(
        most,
        expert_shape=True,
        sampling_mask=mask,
        lower_first=True,
        grammar_from_first_token=grammar,
        adapters=True,  # a name that is not loaded is refused
        options=OPTIONS,
    )


def reads_reasoning_ended(refusal: str) -> bool:
    """Return whether a refusal of a wrong `reasoning_ended` names it as a field that the server knows."""
    return re.search(r"'loc':[^}]*reasoning_ended", refusal) is not None


ONLY_TEXT = "qzxqzxqzx"
"""The only text that the grammar of a probe allows, and that no policy writes unasked."""
BUDGET_PROBE = {"prompt": [0], "max_tokens": 1, "thinking_token_budget": 0}
"""Refused by a server without a reasoning parser, or whose parser has no tags."""
GRAMMAR_PROBE = {
    "prompt": [0], "max_tokens": 16, "temperature": 0.0, "structured_outputs": {"regex": ONLY_TEXT}
}  # fmt: skip
"""Constrained from its first token unless the server waits for the end of a reasoning."""


def constrains_all(refusal: str | None, probe: TextCompletion | None) -> bool | None:
    """Return whether a server applies grammars from the first token; None if it refuses both probes.

    Args:
        refusal: Its refusal of `BUDGET_PROBE`; None if it took it.
        probe: Its answer to `GRAMMAR_PROBE`; None if it refused.
    """
    if refusal is None:
        return False
    if probe is None or len(probe.choices) != 1:
        return None
    return (probe.choices[0].text or "").startswith(ONLY_TEXT)


IMAGES_PROBED = 1000
"""More images than servers take by default (999)."""
_SCALE_OUT = "Start it with --enable-scale-out: only /inference/v1/generate takes images."
_VISION_MODEL = "Serve a model that takes images, with vLLM 0.30 or newer."


def image_support(refusal: str | None) -> ImageSupport:
    """Read from the refusal of too many images how many the server takes; None where the endpoint is closed."""
    if refusal is None:
        return ImageSupport(remedy=_SCALE_OUT)
    found = re.search(r"At most (\d+) image", refusal)
    if found is None:  # a limit above the probe's number, or no images at all
        return ImageSupport("Cache miss for image" in refusal, remedy=_VISION_MODEL)
    most = int(found[1])
    raised = "Raise --limit-mm-per-prompt, or serve a model that takes images."
    return ImageSupport(most > 0, most, _VISION_MODEL if most else raised)


def image_parts(images: Sequence[Image]) -> list[dict[str, Any]]:
    """Return `content_parts`. The data always travel: a server that lost its cache would refuse the id alone."""
    return [{"type": "image_url", "url": data_url_json(image), "uuid": image.sha256.hex()} for image in images]


def media_of(placeholders: Placeholders | None) -> list[tuple[int, int]] | None:
    """Return `mm_placeholders` as `RawResponse.media`."""
    ranges = None if placeholders is None else placeholders.image
    return None if ranges is None else [(each.offset, each.length) for each in ranges]


def generation_fields(info: EngineInfo, request: TokenRequest, on_chunk: OnChunk | None) -> dict[str, Any]:
    """Return the fields of `/inference/v1/generate`, without the prompt's ids."""
    fields = {
        "model": model_of(info, request.adapter),
        "sampling_params": {
            **sampling_fields(request.sampling),
            **optional_request_fields(request, one_more=True),
            "n": 1,
        },
        **info.capabilities.service_fields(request.optional_outputs),
        **stream_fields(on_chunk),
        "return_token_ids": request.echo,
    }
    if request.sampling.grammar is not None:  # it covers the policy's reasoning, too
        fields["reasoning_ended"] = True
    if request.images is not None:
        fields["content_parts"] = image_parts(request.images.images)
    return fields


def model_of(info: EngineInfo, adapter: Adapter | None) -> str:
    """Return the `model` of a request: an adapter's own name, which the answer repeats."""
    return info.model if adapter is None else adapter.name


def completion_fields(info: EngineInfo, request: TokenRequest, on_chunk: OnChunk | None) -> dict[str, Any]:
    """Return the fields of `/v1/completions`, without the prompt's ids."""
    return {
        **sampling_fields(request.sampling),
        "model": model_of(info, request.adapter),
        "n": 1,
        **stream_fields(on_chunk),
        **optional_request_fields(request, one_more=False),
        **info.capabilities.service_fields(request.optional_outputs),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def optional_request_fields(request: TokenRequest, *, one_more: bool) -> dict[str, Any]:
    """Return the request fields of optional outputs. Routed experts and sampling masks depend only on the server.

    `/inference/v1/generate` counts the sampled token as one of the top logprobs: request one more (`one_more`).
    """
    optional_outputs = request.optional_outputs
    k = optional_outputs.top_logprobs
    fields: dict[str, Any] = {"logprobs": k + 1 if k and one_more else k}
    if optional_outputs.prompt_logprobs:
        fields["prompt_logprobs"] = 0
    if optional_outputs.routed_experts:
        fields["routed_experts_prompt_start"] = request.first_routed
    return fields


def reported(
    answer: Completion | Generation, request: TokenRequest, sent: str, *, unordered: bool = False
) -> dict[str, Any]:
    """Return an answer with one choice as fields of `RawResponse`.

    The server's id is `cmpl-<ours>` or `generate-tokens-<ours>`, ours being the header X-Request-Id.

    Args:
        answer: The answer.
        request: The request.
        sent: The id that was sent.
        unordered: See `RawResponse.unordered`.
    """
    fields: dict[str, Any] = {"request_id": sent, "unordered": unordered, "model": answer.model}
    choice: Choice | Generated
    if isinstance(answer, Generation):
        [choice] = answer.choices
        content, prompt_logprobs = choice.logprobs.content if choice.logprobs else None, answer.prompt_logprobs
        fields |= {
            "response_id": answer.request_id,
            "served_by": answer.model,
            "logprobs": None if content is None else [entry.logprob for entry in content],
            "logprob_ids": ids_of(content or ()),
            "echoed": answer.prompt_token_ids,
            "media": media_of(answer.mm_placeholders),
            "versions": [(span.start, span.end, span.version) for span in choice.weight_versions or ()],
        }
    else:
        [choice] = answer.choices
        logprobs, prompt_logprobs = choice.logprobs, choice.prompt_logprobs
        fields |= {
            "response_id": answer.id,
            "served_by": " ".join(word for word in (answer.model, answer.system_fingerprint) if word) or None,
            "logprobs": logprobs.token_logprobs if logprobs else None,
            "logprob_ids": [token_of(text) for text in logprobs.tokens] if logprobs else [],
            "echoed": choice.prompt_token_ids,
        }
    if request.adapter is not None:  # its name is not a sign of another server
        fields["served_by"] = None
    top = choice.logprobs if request.optional_outputs.top_logprobs else None
    return fields | {
        "finish": choice.finish_reason,
        "stop": stop_of(choice, request.sampling),
        "output_ids": choice.token_ids,
        "top_logprobs": None if top is None else top.top,
        "prompt_logprobs": [score_of(entry) for entry in prompt_logprobs[request.first_scored :]]
        if prompt_logprobs
        else None,  # only of the delta
        "routed_experts": choice.routed_experts,
        "sampling_mask": choice.sampling_mask,
        **counts(answer.usage),
    }


def counts(usage: Usage | None) -> dict[str, Any]:
    """Return the token counts as fields of `RawResponse`."""
    if usage is None:
        return {}
    details = usage.prompt_tokens_details
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": details.cached_tokens if details else None,
    }


def stop_of(choice: Choice | Generated, sampling: SamplingParams) -> int | str | None:
    """Return the stop token or string. vLLM reports null for the model's own end-of-sequence token.

    Up to 0.31 `/inference/v1/generate` does not report it. If a stop string was requested and the last token is not a
    stop token, the last token may have completed the string, which a backend without tokenizer cannot know: None.
    """
    if choice.stop_reason is not None and choice.stop_reason is not msgspec.UNSET:
        return choice.stop_reason
    last = choice.token_ids[-1] if choice.token_ids else None
    unknown = choice.stop_reason is msgspec.UNSET and sampling.stop and last not in sampling.stop_token_ids
    return None if unknown else last


def raw_scores(entries: PromptLogprobs, answer: Completion | Generation, sent: str) -> RawScores:
    """Return the scores of a prompt."""
    response_id = answer.request_id if isinstance(answer, Generation) else answer.id
    scored = [score_of(entry) for entry in entries or ()]
    logprobs, ids = [logprob for _, logprob in scored], [token for token, _ in scored]
    of_ids = answer.prompt_token_id_logprobs if isinstance(answer, Generation) else None
    return RawScores(logprobs=logprobs, token_ids=ids, request_id=sent, response_id=response_id, of_ids=of_ids)


def token_of(text: str) -> int | str:
    """Return the id of "token_id:N"; return any other text unchanged."""
    number = text.removeprefix("token_id:")
    return int(number) if number != text and number.isdecimal() else text


def ids_of(entries: Sequence[TokenLogprob]) -> list[int | str]:
    """Return each entry's token id, or the text in its place if that is not an id."""
    return [token_of(entry.token) if entry.token_id is None else entry.token_id for entry in entries]


def score_of(entry: dict[int, PromptLogprob] | None) -> tuple[int | None, float | None]:
    """Return a prompt token's (id, logprob); (None, None) for the first token, whose entry is null."""
    return next(((token, own.logprob) for token, own in (entry or {}).items()), (None, None))


E = TypeVar("E", bound=Completion | Generation)


def stream_fields(on_chunk: OnChunk | None) -> dict[str, Any]:
    """Return the request fields of a streamed or a plain response."""
    if on_chunk is None:
        return {"stream": False}
    return {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def must_not_stream(optional_outputs: OptionalOutputs, *, generates: bool) -> bool:
    """Return whether a stream of the endpoint lacks one of the optional outputs."""
    return (
        optional_outputs.prompt_logprobs
        or optional_outputs.sampling_mask
        or bool(optional_outputs.routed_experts and not generates)
    )


MERGED = 256
"""Events that are kept until they are merged: one takes a kilobyte, its merged token a fifth of that."""


class EventAssembler(Generic[E]):
    """Assembles one response of either endpoint.

    Each event holds only new tokens; the first also the prompt's ids, if requested. Each has the usage so far, where
    the server knows `continuous_usage_stats` (both endpoints of 0.32).

    The usage counts the tokens so far: in each event it reveals lost, duplicated and reordered ones (law 4). On
    `/v1/completions` `text_offset` does too. Where events have neither, the usage at the end reveals lost and
    duplicated ones, and a reordered one is detected only if it is the first with the prompt's ids or the last.
    """

    def __init__(self, kind: type[E]) -> None:
        self._kind = kind
        self._events: list[E] = []
        self._id: str | None = None
        self._offset = 0
        self._tokens = self._unplaced = 0
        self._started = self._finished = False

    def add(self, event: bytes) -> Sequence[int]:
        """See `StreamAssembler.add`."""
        decoded = msgspec.json.decode(event, type=self._kind)
        if len(decoded.choices) > 1:
            raise StreamError(f"an event holds {len(decoded.choices)} completions instead of one")
        if len(self._events) == MERGED:
            self._events = [self.result()]
        self._events.append(decoded)
        self._id = same_request(self._id, decoded.request_id if isinstance(decoded, Generation) else decoded.id)
        if not decoded.choices:
            return []
        new: Choice | Generated = decoded.choices[0]
        echoing: Any = new if isinstance(new, Choice) else decoded
        self._check_order(new, decoded.usage, echoes=echoing.prompt_token_ids != NOTHING)
        return new.token_ids or []

    def result(self) -> E:
        """See `StreamAssembler.result`."""
        if not self._events:
            raise msgspec.DecodeError("the stream had no event")
        answer: Any = merged(self._events)
        answer.choices = [merged(answer.choices)] if answer.choices else []
        return cast(E, answer)

    @property
    def unordered(self) -> bool:
        """See `StreamAssembler.unordered`."""
        return self._unplaced > 1

    def _check_order(self, new: Choice | Generated, usage: Usage | None, *, echoes: bool) -> None:
        """Check an event's place in the stream by what it says of it."""
        if self._finished:
            raise StreamError("an event follows the one with the finish reason")
        if echoes and self._started:
            raise StreamError("the prompt ids follow tokens of the answer")
        offsets = new.logprobs.text_offset if isinstance(new.logprobs, Logprobs) else []
        if offsets and offsets[0] < self._offset:
            raise StreamError(f"an event at text offset {offsets[0]} follows one at {self._offset}")
        self._offset = offsets[0] if offsets else self._offset
        self._tokens += len(new.token_ids or ())
        if usage is not None and usage.completion_tokens != self._tokens:
            raise StreamError(f"an event reports {usage.completion_tokens} tokens so far, but {self._tokens} have come")
        placed = usage is not None or bool(offsets) or echoes or new.finish_reason is not None
        self._unplaced += not placed
        self._started, self._finished = True, new.finish_reason is not None
