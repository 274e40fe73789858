"""What a rollout wants of its engine beside sampled tokens and their logprobs, and whether the server can give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, field_validator, model_validator

from tito_core.backend.errors import UnsupportedByServerError
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.typed_values import InvalidValueError, TypedValues, checked_names, refuse_unknown, shown

MOST_TOP_LOGPROBS = 1024
"""More of them a token would fill a server's memory: SGLang takes any number up to the vocabulary, and dies past it."""
_SALT_FORBIDDEN = frozenset("@/\\\0")
Size = Annotated[int, Field(ge=1, strict=True)]


class OptionalOutputs(TypedValues):
    """What a rollout wants, the same in each of its turns. All of it costs bytes and time, so nothing is the default.

    Attributes:
        top_logprobs: The so many likeliest tokens in the place of each sampled one: columns `top_ids` and
            `top_logprobs`, shape (n, k), likeliest first. They mean what the sampled tokens' logprobs mean (law 11).
        prompt_logprobs: Logprobs of the prompt's own tokens, of each turn's delta alone: column `prompt_logprobs`,
            shape (p,), raw and at temperature 1 on every engine. The first token of a history has none.
        routed_experts: The experts that each token went through: column `routed_experts`, shape (rows, layers,
            experts). The last token of a path has none yet. `True` takes the shape from the engine; SGLang does not
            say it, so give (layers, experts a token), as the model's configuration has them. "flat" takes rows of
            any shape: (rows, layers * experts) if the engine does not say it.
        sampling_mask: The ids that `top_k`, `top_p` and `min_p` left to choose from: column `sampling_mask`, shape
            (n, k), -1 where there are fewer. Needs a finite `top_k`.
        priority: Requests of a greater one are served sooner, where the server schedules by priority.
        cache_salt: Cached prompts are shared only among requests of one salt; None shares with all that have none.
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
        refuse_unknown("optional output named", data, cls.model_fields)
        return data

    @field_validator("cache_salt")
    @classmethod
    def _salt(cls, value: str | None) -> str | None:
        if value is not None and _SALT_FORBIDDEN & set(value):
            raise ValueError(
                f"cache_salt may not hold '@', '/', a backslash or NUL, which some servers refuse: {shown(value)}."
            )
        return value

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """Layers and experts a token, where the user said them."""
        return self.routed_experts if isinstance(self.routed_experts, tuple) else None

    @classmethod
    def of(cls, given: OptionalOutputs | Mapping[str, Any] | None) -> OptionalOutputs:
        """Check what a user wrote; None wants nothing.

        Raises:
            InvalidValueError: An unknown name or a bad value.
        """
        if isinstance(given, OptionalOutputs):
            return given
        if given is None or given == {}:
            return NO_OPTIONAL_OUTPUTS
        if not isinstance(given, Mapping):
            raise InvalidValueError(f"wanted must be a dict, such as {{'top_logprobs': 5}}, not {shown(given)}.")
        return cls(**checked_names("optional output named", given, cls.model_fields))


NO_OPTIONAL_OUTPUTS = OptionalOutputs()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server gives beside sampled tokens. None is unknown: it is asked, and may refuse by itself.

    Attributes:
        top_logprobs: How many likeliest tokens it gives at most.
        prompt_logprobs: Whether it gives them.
        routed_experts: Whether it gives them.
        expert_shape: Whether it says how many layers and experts they are of.
        sampling_mask: Whether it gives one.
        priority: Whether it schedules by it.
        lower_first: Whether it serves requests of a lower priority sooner.
        options: The server's own option that turns a thing on, or allows more of it, by the name in `Wanted`.
    """

    top_logprobs: int | None = None
    prompt_logprobs: bool | None = None
    routed_experts: bool | None = None
    expert_shape: bool | None = None
    sampling_mask: bool | None = None
    priority: bool | None = None
    lower_first: bool = False
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def service(self, optional_outputs: OptionalOutputs) -> dict[str, Any]:
        """Return what is wanted of the service as the fields that both engines call alike."""
        fields: dict[str, Any] = {}
        if optional_outputs.priority is not None:
            fields["priority"] = -optional_outputs.priority if self.lower_first else optional_outputs.priority
        if optional_outputs.cache_salt is not None:
            fields["cache_salt"] = optional_outputs.cache_salt
        return fields

    def check(self, optional_outputs: OptionalOutputs, sampling: SamplingParams, *, backend: str) -> None:
        """Check that a server can give what a rollout wants.

        Raises:
            UnsupportedByServerError: It cannot; the sentence names the option to start it with.
        """
        if optional_outputs is NO_OPTIONAL_OUTPUTS:
            return
        if problem := self._problem(optional_outputs, sampling, f"this {backend} server"):
            raise UnsupportedByServerError(problem, backend=backend)

    def _problem(self, optional_outputs: OptionalOutputs, sampling: SamplingParams, server: str) -> str | None:
        k, most = optional_outputs.top_logprobs, self.top_logprobs
        if most is not None and k > most:
            option = self.options.get("top_logprobs")
            advice = f"lower it, or start the server with a greater {option}" if option else "lower it"
            return f"top_logprobs={k} is more than {server} gives, which is {most}: {advice}."
        for name in ("prompt_logprobs", "routed_experts", "sampling_mask", "priority"):
            asked = getattr(optional_outputs, name)
            if asked is not False and asked is not None and getattr(self, name) is False:
                option = self.options.get(name)
                advice = f"start the server with {option}" if option else "leave it out"
                return f"{name}={asked!r} is wanted, and {server} does not give it: {advice}."
        if optional_outputs.routed_experts is True and self.expert_shape is False:
            return (
                f"routed_experts=True is wanted, and {server} does not say of how many layers they are: give "
                "routed_experts=(layers, experts a token), as the model's configuration has them."
            )
        if optional_outputs.sampling_mask and sampling.temperature > 0 and sampling.top_k < 1:
            return (
                "sampling_mask=True is wanted with all tokens to choose from: set top_k, so that the ids that are left "
                "fit into an answer."
            )
        return None
