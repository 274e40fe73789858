"""Engine-neutral sampling parameters, validated at construction."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypedDict, cast

from pydantic import Field, field_validator, model_validator

from tito_core.backend.values import InvalidValueError, TypedValues, nearest, refuse_unknown, short_repr

_RESPONSE_FIELDS = (
    *("n", "best_of", "use_beam_search", "beam_width", "stream", "stream_options", "echo", "suffix", "detokenize"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "return_logprob", "logprob_start_len", "logprob_token_ids"),
    *("prompt_logprob_start", "prompt_logprob_token_ids", "skip_reading_prefix_cache"),
    *("return_token_ids", "return_tokens_as_token_ids", "return_prompt_token_ids", "return_text_in_logprobs"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "reasoning_ended", "output_kind"),
    *("flat_logprobs", "return_hidden_states", "return_entropy", "token_ids_logprob"),
)
_PROMPT_FIELDS = (
    *("prompt", "prompt_embeds", "input_ids", "token_ids", "text", "messages", "model", "rid", "request_id"),
    *("add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
)
_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "sampling_seed": "seed",
    **dict.fromkeys(("structured_outputs", "response_format", "json_schema", "regex", "ebnf"), "grammar"),
    **dict.fromkeys(("structural_tag", "choice", "guided_json", "guided_regex", "guided_grammar"), "grammar"),
}
"""Engine names of fields of `SamplingParams`. In `extra` they would bypass the turn's record."""
_OPTIONAL_OUTPUT_NAMES = {
    "top_logprobs_num": "top_logprobs",
    **dict.fromkeys(
        ("return_routed_experts", "routed_experts_start_len", "routed_experts_prompt_start"), "routed_experts"
    ),
    "return_sampling_mask": "sampling_mask",
    "priority": "priority",
    "cache_salt": "cache_salt",
}
"""Engine names of fields of `OptionalOutputs`."""
_ALIASES = {
    **_OTHER_NAMES,
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens", "max_length", "max_new_token"), "max_new_tokens"),
    "min_length": "min_new_tokens",
    **dict.fromkeys(("random_seed", "seed_everything"), "seed"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stop_words"), "stop"),
    **dict.fromkeys(("eos_token_id", "stop_tokens"), "stop_token_ids"),
    **dict.fromkeys(("do_sample", "temp"), "temperature"),
    "rep_penalty": "repetition_penalty",
}
"""Names that users of other libraries give as arguments, and the field of `SamplingParams` that they mean."""
_ENGINE_FIELDS = ("logit_bias", "stop_regex")
_SEVERAL = ("n", "best_of", "num_return_sequences", "num_beams", "use_beam_search")
_BY_OUTPUT = {
    **_OPTIONAL_OUTPUT_NAMES,
    **{name: name for name in ("prompt_logprobs", *_OPTIONAL_OUTPUT_NAMES.values())},
}
_REFUSED = {
    **dict.fromkeys(
        ("thinking_token_budget", "max_thinking_tokens", "thinking_budget"),
        "at the limit the server forces the end of the reasoning, and no answer marks the forced tokens. Lower "
        "max_new_tokens instead",
    ),
    "trace_decode_token_ids": "the server emits these tokens instead of sampling",
    **dict.fromkeys(
        ("custom_logit_processor", "custom_params", "logits_processors", "extra_args"),
        "code of the server could force any token, and no answer marks the forced tokens",
    ),
    **dict.fromkeys(("watermark", "watermarking"), "a secret key moves the distribution, and no logprob includes it"),
    "allowed_token_ids": "the answer would be constrained, but recorded as sampled. Set the sampling parameter grammar",
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params"), "another server, whose weights are unknown, computes the prompt"
    ),
    **dict.fromkeys(("lora_path", "lora_id"), "an adapter is a setting of the rollout: adapter=..., which is recorded"),
    "session_params": "the server would put a history of its own before the prompt (law 4)",
    "require_reasoning": "the grammar would begin after the reasoning, but the whole answer be recorded as constrained",
}
"""Engine names of fields that change where tokens come from, each with the reason why it is refused."""
OWNED_FIELDS = frozenset([*_RESPONSE_FIELDS, *_PROMPT_FIELDS])
"""Fields that a backend sets itself; not allowed in `extra`."""
LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises a lower temperature to this; both engines treat a very low one as 0."""


AVOIDED_BIAS = -100.0
"""Added to the logits of a grammar's avoided ids. They are still sampled if the grammar allows no other token."""
MOST_BIAS = 10.0
"""Highest `logit_bias` of a rollout. It multiplies a token's odds by 22,000; a higher one chooses for the policy."""
_BIAS, _STOP_PATTERNS = "logit_bias", "stop_regex"


class Grammar(TypedValues):
    """A constraint on the completion; whatever is sampled under it is `CONSTRAINED`.

    Attributes:
        kind: Type of `value`; "structural_tag" is XGrammar's, in its form with a "format".
        value: The grammar as text. Where the chat template opens the policy's reasoning, the reasoning comes first,
            and a JSON schema, regex or EBNF constrains what follows it; a structural tag is the whole completion.
        avoided_ids: Tokens that the grammar allows by their bytes alone, such as `<tool_call>` inside a JSON string.
            They get a `logit_bias` of -100, so that they are sampled only if the grammar allows nothing else.
    """

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    value: Annotated[str, Field(min_length=1)]
    avoided_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = ()

    @model_validator(mode="after")
    def _schema(self) -> Grammar:
        if self.kind == "json_schema":
            try:
                json.loads(self.value)
            except ValueError as error:
                raise ValueError(f"grammar.value is not JSON ({error}): {short_repr(self.value)}.") from None
        return self


class _Fields(dict[str, Any]):
    """Further fields, which requests share as nobody can change them."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("A request's extra fields are read-only. Give them as sampling={'extra': {...}}.")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return _fixed, (dict(self),)


def _fixed(value: Any) -> Any:
    """Return a copy of JSON-compatible values that cannot be changed."""
    if isinstance(value, dict):
        return _Fields({name: _fixed(one) for name, one in value.items()})
    return tuple(map(_fixed, value)) if isinstance(value, list | tuple) else value


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as a dict, typed so that a typo fails in mypy and in editors."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop_token_ids: Sequence[int]
    stop: str | Sequence[str]
    seed: int | None
    min_new_tokens: int
    ignore_eos: bool
    grammar: Grammar | Mapping[str, Any] | None
    extra: Mapping[str, Any]


class SamplingParams(TypedValues):
    """Sampling parameters of one rollout. All are sent explicitly, so that a server's defaults have no effect.

    Attributes:
        max_new_tokens: Maximum number of tokens to sample in a turn; clamped to the room in the context.
        temperature: 0 is greedy; otherwise at least 0.01.
        top_k: -1 means all tokens. A value above int32 is refused, as it crashes an SGLang server.
        stop_token_ids: Further ids that end an answer, besides the policy's own.
        stop: Strings that end an answer, or one such string.
        seed: Seed of a turn's sampling; None for a random one.
        ignore_eos: Whether to sample to the limit: none of the policy's stop ids is sent. A server may still end at
            `stop_token_ids` that you named.
        grammar: What the answer must fit; see `Grammar`. A forced tool call or a structured output has its own.
        extra: Further fields, passed to the engine unchanged, and read-only: lists become tuples. Which ones is a list
            of each backend; all that the backend sets or that would make tokens that the policy did not sample are
            refused, as is a `stop_regex` that does not compile.
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
    extra: dict[str, Any] = Field(default_factory=_Fields)

    @model_validator(mode="before")
    @classmethod
    def _suggest(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields and name in _ALIASES:
                raise InvalidValueError(f"Unknown sampling parameter {name!r}. Did you mean {_ALIASES[name]!r}?")
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
            raise ValueError("top_k=0 leaves no token to sample: use -1 for all tokens, or 1 for greedy sampling.")
        return value

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: float) -> float:
        if 0 < value < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature={value} is so low that engines treat it as 0: use 0 (greedy) or at least 0.01."
            )
        return value

    @field_validator("extra")
    @classmethod
    def _not_owned(cls, value: dict[str, Any]) -> dict[str, Any]:
        if owned := sorted(OWNED_FIELDS & set(value)):
            raise ValueError(
                f"extra must not contain {', '.join(owned)}: the backend sets these fields, as token-exact rollouts "
                "depend on them. For n samples, run n rollouts."
            )
        for name in value:
            if own := name if name in cls.model_fields else _OTHER_NAMES.get(name):
                raise ValueError(
                    f"extra must not contain {name!r}: use the sampling parameter {own!r}, which is recorded."
                )
            if name in _REFUSED:
                raise ValueError(f"extra must not contain {name!r}: {_REFUSED[name]}.")
            if name in _OPTIONAL_OUTPUT_NAMES:
                option = _OPTIONAL_OUTPUT_NAMES[name]
                raise ValueError(f"extra must not contain {name!r}: use optional_outputs={{{option!r}: ...}}.")
        bias = value.get(_BIAS, {})
        if not isinstance(bias, dict) or not all(
            str(token).isdecimal() and type(each) in (int, float) for token, each in bias.items()
        ):
            raise ValueError(f"logit_bias in extra must map token ids to numbers, not {short_repr(bias)}.")
        for pattern in _patterns(value):
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError, TypeError) as error:  # it would crash some servers
                raise ValueError(f"stop_regex: {short_repr(pattern)} is not a regular expression: {error}.") from None
        try:
            json.dumps(value, allow_nan=False)
            return cast(dict[str, Any], _fixed(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"extra cannot be encoded as JSON ({error}): {short_repr(value)}.") from None

    @model_validator(mode="after")
    def _lengths(self) -> SamplingParams:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}: lower it."
            )
        if self.grammar is not None and self.min_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} cannot be combined with a grammar: a complete grammar allows no "
                "further token, which crashes some servers. Express the minimum length in the grammar."
            )
        return self

    @property
    def stop_patterns(self) -> tuple[str, ...]:
        """The regular expressions in `extra` that end an answer, on an engine that has them."""
        return _patterns(self.extra)

    def within(self, room: int) -> SamplingParams:
        """Return the parameters for at most `room` new tokens."""
        if self.max_new_tokens <= room:
            return self
        limits = {"max_new_tokens": room, "min_new_tokens": min(self.min_new_tokens, room)}
        return self.model_copy(update=limits)

    def shared_fields(self) -> dict[str, Any]:
        """Return the fields with the same names in vLLM and SGLang, as JSON-compatible values."""
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


def _patterns(extra: Mapping[str, Any]) -> tuple[Any, ...]:
    value = extra.get(_STOP_PATTERNS)
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def check_extra(sampling: SamplingParams, known: Collection[str] | None, *, backend: str) -> None:
    """Check the fields in `extra` of a rollout against those that a backend passes on; None if that is unknown.

    Raises:
        InvalidValueError: A name is unknown; the message suggests the nearest. Or a bias would choose the token.
    """
    for token, bias in (sampling.extra.get(_BIAS) or {}).items():
        if isinstance(bias, int | float) and bias > MOST_BIAS:
            raise InvalidValueError(
                f"logit_bias of token {token} is {bias:g}, but at most {MOST_BIAS:g} is allowed: above it the server "
                "forces the token, which would be recorded as sampled. Use a grammar to force text."
            )
    if known is not None:
        refuse_unknown(f"field in extra for {backend}", sampling.extra, sorted(known))


def refuse_unknown_option(
    what: str, given: Mapping[str, Any], known: Collection[str], *, allowed: Collection[str] = ()
) -> None:
    """Check the names of options.

    Raises:
        InvalidValueError: A name is unknown; the message suggests the nearest, or says where sampling parameters go.
    """
    for name in given:
        if name in known or name in allowed:
            continue
        if hint := _where(name):
            raise InvalidValueError(f"{name} {hint}")
        if not nearest(name, known) and (sampling := nearest(name, SamplingParams.model_fields)):
            raise InvalidValueError(
                f"Unknown {what} {short_repr(name)}. Did you mean the sampling parameter "
                f"sampling={{{sampling!r}: ...}}?"
            )
    refuse_unknown(what, {name: value for name, value in given.items() if name not in allowed}, known)


def _where(name: str) -> str | None:
    """Return where a sampling field belongs that OpenAI, vLLM, SGLang or transformers take as an argument, or None."""
    if name in SamplingParams.model_fields:
        return f"is a sampling parameter: pass it as sampling={{{name!r}: ...}}."
    if name in _ALIASES:
        return f"is the sampling parameter {_ALIASES[name]!r} here: pass sampling={{{_ALIASES[name]!r}: ...}}."
    if name in _ENGINE_FIELDS:
        return f"is a sampling field of the engine: pass sampling={{'extra': {{{name!r}: ...}}}}."
    if name in _BY_OUTPUT:
        return f"is an optional output: pass optional_outputs={{{_BY_OUTPUT[name]!r}: ...}}."
    if name in _SEVERAL:
        return "asks for several answers to one request, and a rollout has one: for n samples, run n rollouts."
    if name in ("logprobs", "return_logprob"):
        return "is always on: each sampled token is recorded with its logprob. Leave it out."
    return None
