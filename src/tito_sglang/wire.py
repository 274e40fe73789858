"""What an SGLang server speaks: `/generate` (SGLang 0.5.23)."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tito_core.backend.answer import NOTHING
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


_KEPT_BACK = 2
"""Tokens of the context that the scheduler keeps for itself: it ends a generation for length that much earlier."""


def usable_length(context_length: int | None, loads: Loads) -> int | None:
    """Give the tokens that prompt and completion can have together: context and key-value memory bound them."""
    bounds = [context_length, *(load.max_total_num_tokens for load in loads.loads)]
    known = [bound for bound in bounds if bound is not None]
    return min(known) - _KEPT_BACK if known else None


NO_TOKEN = 2**31 - 1
"""An id that no vocabulary has."""


def vocab_size_in(refusal: str) -> int | None:
    """Read the vocabulary's size out of "logit_bias must has keys in [0, 151935], got ..."; None from other words."""
    found = re.search(r"keys in \[0, (\d+)\]", refusal)
    return int(found[1]) + 1 if found else None


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Give every sampling parameter under SGLang's names, so that no server default is left to apply.

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
