"""What a vLLM server speaks: `/inference/v1/generate`, and `/v1/completions` with `return_token_ids` (0.30 to 0.32)."""

from __future__ import annotations

from typing import Any

import msgspec

from tito_core.backend.answer import NOTHING
from tito_core.backend.sampling import SamplingParams


class Logprobs(msgspec.Struct):
    """`choices[].logprobs`; entries beside the sampled token's are not decoded.

    `tokens` are "token_id:N", since `return_tokens_as_token_ids` is sent; `text_offset` counts their characters.
    """

    token_logprobs: list[float | None]
    tokens: list[str]
    text_offset: list[int] = []


class PromptLogprob(msgspec.Struct):
    """One entry of `prompt_logprobs`, keyed by the token id; the prompt's own token is the first."""

    logprob: float


class Choice(msgspec.Struct):
    """`choices[]`."""

    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = NOTHING
    logprobs: Logprobs | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


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


class TokenLogprob(msgspec.Struct):
    """One entry of `/inference/v1/generate`'s `logprobs.content`; up to 0.31 a `token` "token_id:N" is for the id."""

    logprob: float | None
    token_id: int | None = None
    token: str = ""

    @property
    def id(self) -> int | str:
        """The token's id, or what it says in its place."""
        return token_of(self.token) if self.token_id is None else self.token_id


class Content(msgspec.Struct):
    """`choices[].logprobs` of `/inference/v1/generate`."""

    content: list[TokenLogprob]


class WeightVersion(msgspec.Struct):
    """One entry of `weight_versions` (from 0.32): output tokens `start` to `end` came from `version`."""

    version: str
    start: int
    end: int


class Generated(msgspec.Struct):
    """`choices[]` of `/inference/v1/generate`."""

    finish_reason: str | None
    token_ids: list[int] | None = None
    logprobs: Content | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersion] | None = None


class Generation(msgspec.Struct):
    """The answer of `/inference/v1/generate`."""

    choices: list[Generated]
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = NOTHING


class WeightInfo(msgspec.Struct):
    """`/weight_info`, of servers in development mode."""

    weight_version: str | None = None


class Version(msgspec.Struct):
    """`/version`."""

    version: str


_GRAMMAR_FIELD = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Give every sampling parameter under vLLM's names, so that no server default is left to apply."""
    fields: dict[str, Any] = {
        **sampling.shared_fields(),
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "seed": sampling.seed,
    }
    if sampling.grammar is not None:
        fields["structured_outputs"] = {_GRAMMAR_FIELD[sampling.grammar.kind]: sampling.grammar.value}
    return fields


def token_of(text: str) -> int | str:
    """Read "token_id:N"; other text is given as it is."""
    number = text.removeprefix("token_id:")
    return int(number) if number != text and number.isdecimal() else text


def score_of(entry: dict[int, PromptLogprob] | None) -> tuple[int | None, float | None]:
    """Give a prompt token's (id, logprob); the first token's entry is null and names neither."""
    return next(((token, own.logprob) for token, own in (entry or {}).items()), (None, None))
