"""Outputs of an engine besides sampled tokens and their logprobs, and which of them a server supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, field_validator, model_validator

from tito_core.backend.errors import UnsupportedByServerError
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.typed_values import InvalidValueError, TypedValues, checked_names, refuse_unknown, short_repr

MOST_TOP_LOGPROBS = 1024
"""Bound on `top_logprobs`, to protect a server's memory. SGLang has none, and crashes past its vocabulary size."""
_SALT_FORBIDDEN = frozenset("@/\\\0")
Size = Annotated[int, Field(ge=1, strict=True)]


class OptionalOutputs(TypedValues):
    """The optional outputs of a rollout, the same in each turn. All are off by default, as they cost bytes and time.

    Attributes:
        top_logprobs: Number k of most likely tokens per sampled token: columns `top_ids` and `top_logprobs`, shape
            (n, k), most likely first. They have the semantics of the sampled tokens' logprobs (law 11).
        prompt_logprobs: Logprobs of each turn's own prompt tokens: column `prompt_logprobs`, shape (p,), raw and at
            temperature 1 on every engine. The first token of a history has none.
        routed_experts: The experts that each token was routed to: column `routed_experts`, shape (rows, layers,
            experts). The last token of a path has none yet. `True` takes the shape from the engine. SGLang does not
            report it: give (layers, experts per token) of the model's configuration. "flat" takes rows of any shape:
            (rows, layers * experts) if the engine does not report it.
        sampling_mask: The ids that `top_k`, `top_p` and `min_p` keep: column `sampling_mask`, shape (n, k), padded
            with -1. Needs a finite `top_k`.
        priority: Higher is served sooner, if the server schedules by priority.
        cache_salt: Requests share cached prompts only with requests of the same salt (None: with those without one).
    """

    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS, strict=True)] = 0
    prompt_logprobs: StrictBool = False
    routed_experts: StrictBool | Literal["flat"] | tuple[Size, Size] = False
    sampling_mask: StrictBool = False
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31, strict=True)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        refuse_unknown("optional output", data, cls.model_fields)
        return data

    @field_validator("cache_salt")
    @classmethod
    def _salt(cls, value: str | None) -> str | None:
        if value is not None and _SALT_FORBIDDEN & set(value):
            raise ValueError(
                "cache_salt must not contain '@', '/', a backslash or NUL, which some servers refuse: "
                f"{short_repr(value)}."
            )
        return value

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """(layers, experts per token), or None if the user did not give them."""
        return self.routed_experts if isinstance(self.routed_experts, tuple) else None

    @classmethod
    def of(cls, given: OptionalOutputs | Mapping[str, Any] | None) -> OptionalOutputs:
        """Check a user's value; None means no optional outputs.

        Raises:
            InvalidValueError: An unknown name or a bad value.
        """
        if isinstance(given, OptionalOutputs):
            return given
        if given is None or given == {}:
            return NO_OPTIONAL_OUTPUTS
        if not isinstance(given, Mapping):
            raise InvalidValueError(
                f"optional_outputs must be a dict, such as {{'top_logprobs': 5}}, not {short_repr(given)}."
            )
        return cls(**checked_names("optional output", given, cls.model_fields))


NO_OPTIONAL_OUTPUTS = OptionalOutputs()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional outputs that a server supports. None is unknown: the request is sent, and the server may refuse it.

    Attributes:
        top_logprobs: Largest number of top logprobs per token.
        prompt_logprobs: Whether it supports them.
        routed_experts: Whether it supports them.
        expert_shape: Whether it reports the number of layers and experts.
        sampling_mask: Whether it supports it.
        priority: Whether it schedules by priority.
        lower_first: Whether it serves a lower priority sooner.
        grammar: Whether a grammar constrains an answer from its first token. False where the server applies it only
            after the policy's reasoning.
        options: The server option that enables an output, or raises its limit, by its name in `OptionalOutputs`; and
            that for a "grammar".
    """

    top_logprobs: int | None = None
    prompt_logprobs: bool | None = None
    routed_experts: bool | None = None
    expert_shape: bool | None = None
    sampling_mask: bool | None = None
    priority: bool | None = None
    lower_first: bool = False
    grammar: bool | None = None
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def service_fields(self, optional_outputs: OptionalOutputs) -> dict[str, Any]:
        """Return priority and cache salt under the field names that both engines share."""
        fields: dict[str, Any] = {}
        if optional_outputs.priority is not None:
            fields["priority"] = -optional_outputs.priority if self.lower_first else optional_outputs.priority
        if optional_outputs.cache_salt is not None:
            fields["cache_salt"] = optional_outputs.cache_salt
        return fields

    def check(self, optional_outputs: OptionalOutputs, sampling: SamplingParams, *, backend: str) -> None:
        """Check that the server supports the optional outputs, and applies the grammar to the whole answer.

        Raises:
            UnsupportedByServerError: It does not; the message names the option that enables the output.
        """
        if sampling.grammar is not None and self.grammar is False:
            option = f", or a newer version with {self.options['grammar']}" if "grammar" in self.options else ""
            raise UnsupportedByServerError(
                f"This {backend} server would apply a grammar only after the policy's reasoning, so it was not sent: a "
                "forced tool call, structured output or another grammar would not constrain the answer. "
                f"Start it without its reasoning parser{option}.",
                backend=backend,
            )
        if optional_outputs is NO_OPTIONAL_OUTPUTS:
            return
        if problem := self._problem(optional_outputs, sampling, f"this {backend} server"):
            raise UnsupportedByServerError(problem, backend=backend)

    def _problem(self, optional_outputs: OptionalOutputs, sampling: SamplingParams, server: str) -> str | None:
        k, most = optional_outputs.top_logprobs, self.top_logprobs
        if most is not None and k > most:
            option = self.options.get("top_logprobs")
            advice = f"Lower it, or start the server with a higher {option}" if option else "Lower it"
            return f"top_logprobs={k} exceeds the limit of {server}, {most}. {advice}."
        for name in ("prompt_logprobs", "routed_experts", "sampling_mask", "priority"):
            requested = getattr(optional_outputs, name)
            if requested is not False and requested is not None and getattr(self, name) is False:
                option = self.options.get(name)
                advice = f"Start the server with {option}" if option else "Leave it out"
                return f"{name}={requested!r} is not supported by {server}. {advice}."
        if optional_outputs.routed_experts is True and self.expert_shape is False:
            return (
                f"routed_experts=True needs a server that reports the number of layers, and {server} does not. Give "
                "routed_experts=(layers, experts per token) of the model's configuration."
            )
        if optional_outputs.sampling_mask and sampling.temperature > 0 and sampling.top_k < 1:
            return (
                "sampling_mask=True needs a finite top_k: without one, the mask of each token could hold the whole "
                "vocabulary. Set top_k in the sampling parameters."
            )
        return None
