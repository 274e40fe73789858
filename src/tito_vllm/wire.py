"""What a vLLM server speaks: `/inference/v1/generate`, `/v1/completions` with `return_token_ids`, streams of both.

Measured with 0.30 to 0.32. Each event of a stream holds what is new: the first the prompt's ids, the last the usage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from tito_core.backend.http.streaming import StreamError, go_on
from tito_core.backend.optional_outputs import Capabilities, OptionalOutputs
from tito_core.backend.protocol import NOTHING, OnChunk, RawScores, Scored, TokenRequest
from tito_core.backend.sampling import SamplingParams


class Logprobs(msgspec.Struct):
    """`choices[].logprobs`; entries beside the sampled token's are decoded where they were asked for.

    `tokens` are "token_id:N", since `return_tokens_as_token_ids` is sent; `text_offset` counts their characters.
    """

    token_logprobs: list[float | None]
    tokens: list[str]
    text_offset: list[int] = []
    top_logprobs: list[msgspec.Raw] | None = None

    def top(self) -> list[Scored]:
        """Decode the likeliest tokens in the place of each, and the sampled one."""
        rows = (msgspec.json.decode(row, type=dict[str, float | None] | None) for row in self.top_logprobs or ())
        return [[(token_of(text), logprob) for text, logprob in (row or {}).items()] for row in rows]


class PromptLogprob(msgspec.Struct, gc=False):
    """One entry of `prompt_logprobs`, keyed by the token id; the prompt's own token is the first.

    Hundreds come with an answer. The garbage collector does not count them, which it would begin its rounds for.
    """

    logprob: float


PromptLogprobs = list[dict[int, PromptLogprob] | None] | None
"""One entry a prompt token, null for the first."""


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
    """The answer of `/v1/completions`."""

    choices: list[Choice]
    usage: Usage | None = None


class TokenLogprob(msgspec.Struct, gc=False):
    """One entry of `/inference/v1/generate`'s `logprobs.content`; up to 0.31 a `token` "token_id:N" is for the id."""

    logprob: float | None
    token_id: int | None = None
    token: str = ""
    top_logprobs: msgspec.Raw = NOTHING

    @property
    def id(self) -> int | str:
        """The token's id, or what it says in its place."""
        return token_of(self.token) if self.token_id is None else self.token_id

    def top(self) -> Scored:
        """Decode the likeliest tokens in its place, and the sampled one."""
        entries = msgspec.json.decode(self.top_logprobs, type=list[TokenLogprob] | None)
        return [(entry.id, entry.logprob) for entry in entries or ()]


class Content(msgspec.Struct):
    """`choices[].logprobs` of `/inference/v1/generate`."""

    content: list[TokenLogprob]

    def top(self) -> list[Scored]:
        """Decode the likeliest tokens in the place of each, and the sampled one."""
        return [entry.top() for entry in self.content]


class WeightVersion(msgspec.Struct):
    """One entry of `weight_versions` (from 0.32): output tokens `start` to `end` came from `version`."""

    version: str
    start: int
    end: int


class Generated(msgspec.Struct):
    """`choices[]` of `/inference/v1/generate`; up to 0.31 without `stop_reason`."""

    finish_reason: str | None
    token_ids: list[int] | None = None
    logprobs: Content | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    weight_versions: list[WeightVersion] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class Generation(msgspec.Struct):
    """The answer of `/inference/v1/generate`."""

    choices: list[Generated]
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = NOTHING
    prompt_logprobs: PromptLogprobs = None


class WeightInfo(msgspec.Struct):
    """`/weight_info`, of servers in development mode."""

    weight_version: str | None = None


class Version(msgspec.Struct):
    """`/version`."""

    version: str


_GRAMMAR_FIELD = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return every sampling parameter under vLLM's names, so that no server default is left to apply."""
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
}
TOO_MANY_LOGPROBS = 2**31 - 1
"""More than any server gives, so that it says how many it does."""


def capabilities(refusal: str, *, one_more: bool) -> Capabilities:
    """Read "... greater than max allowed: 20 ..." out of a refusal; `one_more` is as in `optional_request_fields`."""
    found = re.search(r"max allowed: (\d+)", refusal)
    most = None if found is None else max(int(found[1]) - one_more, 0)
    mask = None if one_more else False  # `/v1/completions` has no field for it
    return Capabilities(most, expert_shape=True, sampling_mask=mask, lower_first=True, options=OPTIONS)


def optional_request_fields(request: TokenRequest, *, one_more: bool) -> dict[str, Any]:
    """Return the parameters for what is wanted of an answer. Routed experts and sampling masks come unasked, or never.

    `/inference/v1/generate` cuts its list at the number that was asked for, the sampled token included (`one_more`).
    """
    optional_outputs = request.optional_outputs
    k = optional_outputs.top_logprobs
    fields: dict[str, Any] = {"logprobs": k + 1 if k and one_more else k}
    if optional_outputs.prompt_logprobs:
        fields["prompt_logprobs"] = 0
    if optional_outputs.routed_experts:
        fields["routed_experts_prompt_start"] = request.first_routed
    return fields


def optional_response_fields(
    choice: Choice | Generated, logprobs: Logprobs | Content | None, prompt: PromptLogprobs, request: TokenRequest
) -> dict[str, Any]:
    """Return what was wanted as fields of `RawResponse`, of the delta's prompt tokens alone."""
    return {
        "top_logprobs": logprobs.top if logprobs is not None and request.optional_outputs.top_logprobs else None,
        "prompt_logprobs": [score_of(entry) for entry in prompt[request.first_scored :]] if prompt else None,
        "routed_experts": choice.routed_experts,
        "sampling_mask": choice.sampling_mask,
    }


def counts(usage: Usage | None) -> dict[str, Any]:
    """Return the counts of tokens as fields of `RawResponse`."""
    if usage is None:
        return {}
    details = usage.prompt_tokens_details
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": details.cached_tokens if details else None,
    }


def stop_of(choice: Choice | Generated, sampling: SamplingParams) -> int | str | None:
    """Return what stopped it: vLLM reports null for the model's own end-of-sequence token.

    Up to 0.31 `/inference/v1/generate` reports nothing, so that a last token which ends nothing may have completed a
    stop string. The backend has no tokenizer to tell: None.
    """
    if choice.stop_reason is not None and choice.stop_reason is not msgspec.UNSET:
        return choice.stop_reason
    last = choice.token_ids[-1] if choice.token_ids else None
    unnamed = choice.stop_reason is msgspec.UNSET and sampling.stop and last not in sampling.stop_token_ids
    return None if unnamed else last


def raw_scores(entries: PromptLogprobs, request_id: str) -> RawScores:
    """Return the scores of a prompt."""
    scored = [score_of(entry) for entry in entries or ()]
    logprobs, ids = [logprob for _, logprob in scored], [token for token, _ in scored]
    return RawScores(logprobs=logprobs, token_ids=ids, request_id=request_id)


def token_of(text: str) -> int | str:
    """Read "token_id:N"; other text is given as it is."""
    number = text.removeprefix("token_id:")
    return int(number) if number != text and number.isdecimal() else text


def score_of(entry: dict[int, PromptLogprob] | None) -> tuple[int | None, float | None]:
    """Return a prompt token's (id, logprob); the first token's entry is null and names neither."""
    return next(((token, own.logprob) for token, own in (entry or {}).items()), (None, None))


E = TypeVar("E", bound=Completion | Generation)


def stream_fields(on_chunk: OnChunk | None) -> dict[str, Any]:
    """Return the fields that ask for a stream, or for none."""
    return {"stream": False} if on_chunk is None else {"stream": True, "stream_options": {"include_usage": True}}


def not_streamed(optional_outputs: OptionalOutputs, *, generates: bool) -> bool:
    """Return whether a stream does not bring what is wanted: then the answer comes in one body."""
    return (
        optional_outputs.prompt_logprobs
        or optional_outputs.sampling_mask
        or bool(optional_outputs.routed_experts and not generates)
    )


class Events(Generic[E]):
    """Puts one answer of either endpoint together.

    An event that is lost or comes twice is found out at the end, by the usage, which counts the tokens (law 4). One
    that comes out of order is found out where it is the first or the last, and on `/v1/completions` anywhere, where
    `text_offset` counts what came before.
    """

    def __init__(self, kind: type[E]) -> None:
        self._kind = kind
        self._whole: E | None = None
        self._offset = 0
        self._began = self._finished = False

    def take(self, event: bytes) -> Sequence[int]:
        """See `Gathering.take`."""
        said = msgspec.json.decode(event, type=self._kind)
        if len(said.choices) > 1:
            raise StreamError(f"an event holds {len(said.choices)} completions, and one was asked for")
        choices, said.choices = cast(list[Choice | Generated], said.choices), []
        if self._whole is None:
            self._whole = said
        else:
            go_on(self._whole, said)
        if not choices:
            return []
        (new,) = choices
        echoing = new if isinstance(new, Choice) else cast(Generation, said)
        self._in_order(new, echoing.prompt_token_ids != NOTHING)
        sampled = tuple(new.token_ids or ())  # a list of the first event gets longer
        whole = cast(list[Choice | Generated], self._whole.choices)
        if whole:
            go_on(whole[0], new)
        else:
            whole.append(new)
        return sampled

    def whole(self) -> E:
        """See `Gathering.whole`."""
        if self._whole is None:
            raise msgspec.DecodeError("it streamed no event")
        return self._whole

    def _in_order(self, new: Choice | Generated, echoes: bool) -> None:
        if self._finished:
            raise StreamError("an event goes on after the one that told how it finished")
        if echoes and self._began:
            raise StreamError("the prompt's ids come after tokens of the answer")
        offsets = new.logprobs.text_offset if isinstance(new.logprobs, Logprobs) else []
        if offsets and offsets[0] < self._offset:
            raise StreamError(f"an event begins at text offset {offsets[0]}, after one that began at {self._offset}")
        self._offset = offsets[0] if offsets else self._offset
        self._began, self._finished = True, new.finish_reason is not None
