"""Engine-neutral sampling parameters, validated where the user writes them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tito_core.backend.typed_values import InvalidValueError, TypedValues, nearest, refuse_unknown, shown

_ANSWER_SHAPE = (
    *("n", "best_of", "use_beam_search", "beam_width", "stream", "stream_options", "echo", "suffix", "detokenize"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "return_logprob", "logprob_start_len", "logprob_token_ids"),
    *("prompt_logprob_start", "prompt_logprob_token_ids", "skip_reading_prefix_cache"),
    *("return_token_ids", "return_tokens_as_token_ids", "return_prompt_token_ids", "return_text_in_logprobs"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
)
_PROMPT = (
    *("prompt", "prompt_embeds", "input_ids", "token_ids", "text", "messages", "model", "rid", "request_id"),
    *("add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
)
_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "sampling_seed": "seed",
    "stop_regex": "stop",  # a malformed one kills a real SGLang server
    **dict.fromkeys(("structured_outputs", "response_format", "json_schema", "regex", "ebnf"), "grammar"),
    **dict.fromkeys(("structural_tag", "choice", "guided_json", "guided_regex", "guided_grammar"), "grammar"),
}
"""Engines' own names of what `SamplingParams` has: set past it, the record of the turn would not know of it."""
_WANTED_NAMES = {
    "top_logprobs_num": "top_logprobs",
    **dict.fromkeys(
        ("return_routed_experts", "routed_experts_start_len", "routed_experts_prompt_start"), "routed_experts"
    ),
    "return_sampling_mask": "sampling_mask",
    "priority": "priority",
    "cache_salt": "cache_salt",
}
"""Engines' own names of what a rollout asks for by `wanted`."""
OWNED_FIELDS = frozenset([*_ANSWER_SHAPE, *_PROMPT])
"""Fields that a backend sets itself; a user's `extra` may not."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises a lower one to this without a word, and both engines take a very low one for 0."""


AVOIDED_BIAS = -100.0
"""Added to the logits of a grammar's avoided ids: where it leaves no other token they come all the same."""
_BIAS = "logit_bias"


class Grammar(TypedValues):
    """A constraint on the completion; whatever is sampled under it is `CONSTRAINED`.

    Attributes:
        kind: What `value` is; a "structural_tag" is XGrammar's, in its form with a "format".
        value: The grammar, as text.
        avoided_ids: Tokens that the grammar would let through by their bytes alone, such as `<tool_call>` inside a JSON
            string. They get a `logit_bias` of -100, so that they come only where the grammar leaves nothing else.
    """

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    value: Annotated[str, Field(min_length=1)]
    avoided_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = ()


class SamplingParams(TypedValues):
    """Sampling parameters of one rollout. All are sent explicitly, so a server's own defaults cannot change it.

    Attributes:
        max_new_tokens: Most tokens to sample in a turn; clamped to what the context leaves.
        temperature: 0 is greedy; otherwise at least 0.01.
        top_k: -1 means all. One past int32 kills a real SGLang server, so it is refused here.
        stop: Strings that end an answer; a string alone is one of them.
        seed: Seed of a turn's sampling where the engine has one, None for a random one.
        extra: Further fields passed to the engine as they are, except those the backend owns.
    """

    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 1024
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = ()
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None
    extra: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _suggest(cls, data: Any) -> Any:
        refuse_unknown("sampling parameter", data, cls.model_fields)
        return data

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value == 0:
            raise ValueError("top_k=0 would leave nothing to sample; use -1 for all tokens or 1 for the likeliest.")
        return value

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: float) -> float:
        if 0 < value < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature={value} is too low for engines to tell from 0: use 0 for greedy, or 0.01.")
        return value

    @field_validator("extra")
    @classmethod
    def _not_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        if owned := sorted(OWNED_FIELDS & set(value)):
            raise ValueError(
                f"The backend sets {', '.join(owned)} itself, since token-exact rollouts depend on it. "
                "For n samples, make n rollouts."
            )
        for name in value:
            if own := name if name in cls.model_fields else _OTHER_NAMES.get(name):
                raise ValueError(f"extra may not hold {name!r}: use the sampling parameter {own!r}, which is recorded.")
            if name in _WANTED_NAMES:
                raise ValueError(f"extra may not hold {name!r}: ask for it by wanted={{{_WANTED_NAMES[name]!r}: ...}}.")
        if not isinstance(value.get(_BIAS, {}), dict):
            raise ValueError(f"extra: logit_bias must map token ids to numbers, not {shown(value[_BIAS])}.")
        try:
            json.dumps(value, allow_nan=False)
            return deepcopy(value)  # what a user goes on to change is not what was checked
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"extra cannot be sent as JSON ({error}): {shown(value)}.") from None

    @model_validator(mode="after")
    def _lengths(self) -> SamplingParams:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}: lower it."
            )
        if self.grammar is not None and self.min_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} and a grammar do not go together: once the grammar is complete "
                "no token is left to sample, which kills some servers. Let the grammar say how long it is."
            )
        return self

    def within(self, room: int) -> SamplingParams:
        """Return the parameters for at most `room` new tokens."""
        if self.max_new_tokens <= room:
            return self
        limits = {"max_new_tokens": room, "min_new_tokens": min(self.min_new_tokens, room)}
        return self.model_copy(update=limits)

    def apart(self) -> SamplingParams:
        """Return the same parameters with `extra` of their own, for somebody who may change it."""
        return self.model_copy(update={"extra": deepcopy(self.extra)})

    def shared_fields(self) -> dict[str, Any]:
        """Return the fields that vLLM and SGLang call by the same names, as JSON-compatible values."""
        extra = dict(self.extra)
        if self.grammar is not None and self.grammar.avoided_ids:
            avoided = dict.fromkeys(map(str, self.grammar.avoided_ids), AVOIDED_BIAS)
            extra[_BIAS] = {**extra.get(_BIAS, {}), **avoided}
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "stop_token_ids": list(self.stop_token_ids),
            "stop": list(self.stop),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            **extra,
        }


def refuse_unknown_option(
    what: str, given: Mapping[str, Any], known: Collection[str], *, allowed: Collection[str] = ()
) -> None:
    """Check the names of options.

    Raises:
        InvalidValueError: One is not known; the sentence says where a sampling parameter goes, or names the nearest.
    """
    for name in given:
        if name in known or name in allowed:
            continue
        if name in SamplingParams.model_fields:
            raise InvalidValueError(f"{name} is a sampling parameter: give it as sampling={{{name!r}: ...}}.")
        if not nearest(name, known) and (sampling := nearest(name, SamplingParams.model_fields)):
            raise InvalidValueError(
                f"There is no {what} {shown(name)}; did you mean the sampling parameter in "
                f"sampling={{{sampling!r}: ...}}?"
            )
    refuse_unknown(what, {name: value for name, value in given.items() if name not in allowed}, known)
