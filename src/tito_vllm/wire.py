"""What a vLLM server speaks: `/v1/completions` with `return_token_ids` (vLLM 0.30 to 0.32)."""

from __future__ import annotations

from typing import Any

import msgspec

from tito_core.backend.sampling import SamplingParams


class Logprobs(msgspec.Struct):
    """`choices[].logprobs`; entries beside the sampled token's are not decoded."""

    token_logprobs: list[float | None]


class PromptLogprob(msgspec.Struct):
    """One entry of `prompt_logprobs`, keyed by the token id as a string."""

    logprob: float


class Choice(msgspec.Struct):
    """`choices[]`."""

    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


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
    usage: Usage


class Model(msgspec.Struct):
    """One entry of `/v1/models`."""

    id: str
    max_model_len: int | None = None
    owned_by: str | None = None


class Models(msgspec.Struct):
    """`/v1/models`."""

    data: list[Model]


class Version(msgspec.Struct):
    """`/version`."""

    version: str


_GRAMMAR_FIELD = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Give every sampling parameter under vLLM's names, so that no server default is left to apply."""
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        "seed": sampling.seed,
        "min_tokens": sampling.min_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if sampling.grammar is not None:
        fields["structured_outputs"] = {_GRAMMAR_FIELD[sampling.grammar.kind]: sampling.grammar.value}
    return {**fields, **sampling.extra}
