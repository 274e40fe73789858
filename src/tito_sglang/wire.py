"""What an SGLang server speaks: `/generate` (SGLang 0.5.23)."""

from __future__ import annotations

from typing import Any

import msgspec

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


class MetaInfo(msgspec.Struct):
    """`meta_info`. An abort in the queue lacks `prompt_tokens` and `cached_tokens`."""

    id: str
    finish_reason: FinishReason | None
    completion_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    weight_versions: list[WeightVersions] = []
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class Generation(msgspec.Struct):
    """The answer of `/generate`."""

    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: list[int] | None = None


class Model(msgspec.Struct):
    """One entry of `/v1/models`."""

    id: str
    max_model_len: int | None = None
    owned_by: str | None = None


class Models(msgspec.Struct):
    """`/v1/models`."""

    data: list[Model]


class ModelInfo(msgspec.Struct):
    """`/model_info`."""

    weight_version: str | None = None


class Loads(msgspec.Struct):
    """`/v1/loads`, which also tells the server's version."""

    version: str | None = None


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Give every sampling parameter under SGLang's names, so that no server default is left to apply.

    `no_stop_trim` and `skip_special_tokens` keep the text whole; ids and logprobs hold the stop token anyway.
    """
    fields: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        "min_new_tokens": sampling.min_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if sampling.seed is not None:
        fields["sampling_seed"] = sampling.seed
    if sampling.grammar is not None:
        fields[sampling.grammar.kind] = sampling.grammar.value
    return {**fields, **sampling.extra}
