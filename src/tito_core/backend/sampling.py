"""Engine-neutral sampling parameters, validated where the user writes them."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

OWNED_FIELDS = frozenset(
    [
        "n",
        "best_of",
        "stream",
        "stream_options",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "echo",
        "prompt",
        "input_ids",
        "token_ids",
        "model",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "return_logprob",
        "logprob_start_len",
        "return_prompt_token_ids",
        "rid",
        "request_id",
        "return_text_in_logprobs",
        "detokenize",
        "skip_special_tokens",
    ]
)
"""Fields that a backend sets itself; a user's `extra` may not."""


class Grammar(BaseModel):
    """A constraint on the completion; whatever is sampled under it is `CONSTRAINED`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["json_schema", "regex", "ebnf"]
    value: str


class SamplingParams(BaseModel):
    """Sampling parameters of one rollout. All are sent explicitly, so a server's own defaults cannot change it.

    Attributes:
        max_new_tokens: Most tokens to sample in a turn; clamped to what the context leaves.
        temperature: 0 is greedy.
        top_k: -1 means all.
        seed: Seed of a turn's sampling where the engine has one, None for a random one.
        extra: Further fields passed to the engine as they are, except those the backend owns.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens: Annotated[int, Field(ge=1)] = 1024
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    seed: int | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None
    extra: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _suggest(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                near = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f". Known: {', '.join(cls.model_fields)}."
                raise ValueError(f"There is no sampling parameter {name!r}{hint}")
        return data

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value == 0:
            raise ValueError("top_k=0 would leave nothing to sample; use -1 for all tokens or 1 for the likeliest.")
        return value

    @field_validator("extra")
    @classmethod
    def _not_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        if owned := sorted(OWNED_FIELDS & set(value)):
            raise ValueError(
                f"The backend sets {', '.join(owned)} itself, since token-exact rollouts depend on it. "
                "For n samples, make n rollouts."
            )
        return value
