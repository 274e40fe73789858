"""The options of one rollout: each one's name, type, default, meaning and check are in this file, and nowhere else."""

# ruff: noqa: RUF009  # fields are declared by `_option`, which makes each its own

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, Unpack, get_args

from strands.models.model import BaseModelConfig

from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.optional_outputs import NO_OPTIONAL_OUTPUTS, OptionalOutputs
from tito_core.backend.resume import MAX_RESUMES, AbortPolicy, OnAbort
from tito_core.backend.sampling import SamplingParams, refuse_unknown_option
from tito_core.backend.typed_values import InvalidValueError, at_least, checked_names, positive_seconds, shown

MalformedCalls = Literal["feedback", "end_turn", "raise"]
"""What becomes of a malformed call: the policy reads why, the turn ends in text, or an error is raised."""


class RolloutOptions(TypedDict, total=False):
    """The options of one rollout, as `TITOModel`, `Policy.model` and everything that makes models take them.

    Attributes:
        sampling: Sampling parameters of all turns. Default: those of `SamplingParams`.
        context_window_limit: Tokens of context to use; the server's own length when None, the default.
        history: What to do when an agent's own history changed: "fork", the default, makes a branch that is linked to
            where it left, "error" raises `HistoryChangedError` before anything is sent.
        malformed_calls: What becomes of a call that is not sound; it never runs. "feedback", the default, lets the
            policy read why, "end_turn" ends the turn with its text, "raise" raises `MalformedCallError`. The turn is
            kept in each case.
        thinking: What becomes of sampled reasoning where the chat template would strip it: "keep", the default, leaves
            it where it was sampled, "as-template" begins a branch from the template's own rendering, linked to where it
            left.
        on_abort: What becomes of an answer that the server was told to abort, as trainers do before they change
            weights: "resume", the default, continues the same turn from its tokens, "discard" raises
            `GenerationAbortedError`, "commit" keeps the part that is there as a turn that was cut off.
        max_resumes: How often one answer is resumed at most. Default: 16.
        turn_timeout_s: Longest wait for a turn's answer in seconds, with pauses, retries and resumed parts; None, the
            default, leaves each request to the backend's `timeout_s`.
        max_total_tokens: Most tokens of a trajectory, prompts and answers together; None, the default, for no bound but
            the context. An answer that would exceed it is cut there and ends with `max_tokens`; when none is left,
            `TotalTokensReachedError` is raised before sending.
        stream: Whether Strands gets reasoning and text while they are sampled; the ledger is the same. Calls come once
            the answer is whole, since until then a limit may make text of them. Default: False.
        wanted: What to ask of the engine besides sampled tokens and their logprobs, such as {"top_logprobs": 5}; see
            `Wanted`. It comes as optional columns of the trajectory. Default: nothing.
        verify_echo: How often the server is asked to echo the prompt's ids, which are compared with those that were
            sent: on "always", the default, every turn, or on the "first" of each path only, which saves a long
            context's bytes. The number of prompt tokens that the server counted is compared on every turn (law 4).
    """

    sampling: SamplingParams | Mapping[str, Any] | None
    context_window_limit: int | None
    history: Literal["fork", "error"]
    malformed_calls: MalformedCalls
    thinking: Literal["keep", "as-template"]
    on_abort: OnAbort
    max_resumes: int
    turn_timeout_s: float | None
    max_total_tokens: int | None
    stream: bool
    optional_outputs: OptionalOutputs | Mapping[str, Any] | None
    verify_echo: Literal["always", "first"]


class TITOConfig(BaseModelConfig, total=False):
    """What Strands and tracing read of the model.

    Attributes:
        model_id: Name under which the server takes requests.
        backend: Name of the backend.
        parser: Name of the tool-call format.
        sampling: Sampling parameters, as set.
    """

    model_id: str
    backend: str
    parser: str
    sampling: dict[str, Any]


def sampling_params(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Return checked parameters from what a user wrote; defaults for None.

    Raises:
        ValueError: An unknown name or a bad value.
    """
    if isinstance(given, SamplingParams):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise InvalidValueError(f"sampling must be a dict, such as {{'temperature': 0.7}}, not {shown(given)}.")
    return SamplingParams(**checked_names("sampling parameter", given or {}, SamplingParams.model_fields))


def _option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    """Declare an option: its default, and what checks a value by the option's name and returns it."""
    return field(default=default, metadata={"check": check})


def _one_of(allowed: Any) -> Any:
    """Declare an option that is one of a `Literal`'s values, the first by default."""
    values = get_args(allowed)

    def check(name: str, given: Any) -> Any:
        if given not in values:
            *most, last = map(repr, values)
            raise InvalidValueError(f"{name} must be {', '.join(most)} or {last}, not {shown(given)}.")
        return given

    return _option(values[0], check)


def _tokens(name: str, given: Any) -> int | None:
    return None if given is None else at_least(name, given, 1, "a number of tokens, at least 1, or None")


def _seconds(name: str, given: Any) -> float | None:
    return None if given is None else positive_seconds(name, given, "a positive number of seconds, or None")


def _boolean(name: str, given: Any) -> bool:
    if given not in (True, False):
        raise InvalidValueError(f"{name} must be True or False, not {shown(given)}.")
    return bool(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of one rollout, checked. Build them with `Settings.of`; `RolloutOptions` says what each means.

    Attributes:
        reports_ids: Whether the event that ends a message carries the ids of its prompt and answer, for callbacks.
        runs_calls: Whether Strands gets the policy's calls as calls; else they are text, unless one was forced.
        aborts: `on_abort` and `max_resumes` as the backend's seam takes them.
    """

    sampling: SamplingParams = _option(SamplingParams(), lambda _, given: sampling_params(given))
    context_window_limit: int | None = _option(None, _tokens)
    history: Literal["fork", "error"] = _one_of(Literal["fork", "error"])
    malformed_calls: MalformedCalls = _one_of(MalformedCalls)
    thinking: Literal["keep", "as-template"] = _one_of(Literal["keep", "as-template"])
    on_abort: OnAbort = _option(AbortPolicy().on_abort, lambda _, given: AbortPolicy(on_abort=given).on_abort)
    max_resumes: int = _option(MAX_RESUMES, lambda _, given: AbortPolicy(max_resumes=given).max_resumes)
    turn_timeout_s: float | None = _option(None, _seconds)
    max_total_tokens: int | None = _option(None, _tokens)
    stream: bool = _option(False, _boolean)
    optional_outputs: OptionalOutputs = _option(NO_OPTIONAL_OUTPUTS, lambda _, given: OptionalOutputs.of(given))
    verify_echo: Literal["always", "first"] = _one_of(Literal["always", "first"])
    reports_ids: bool = False
    runs_calls: bool = True
    aborts: AbortPolicy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "aborts", AbortPolicy(self.on_abort, self.max_resumes))

    @classmethod
    def of(cls, **options: Unpack[RolloutOptions]) -> Settings:
        """Check what a user wrote.

        Raises:
            InvalidValueError: An unknown name, or a bad value.
        """
        return cls(**_checked(options))

    def at(self, info: EngineInfo) -> Settings:
        """Return them for a server: at most its context length.

        Raises:
            UnsupportedByServerError: It cannot give what is wanted; the sentence names the option to start it with.
        """
        info.capabilities.check(self.optional_outputs, self.sampling, backend=info.backend)
        lengths = [length for length in (self.context_window_limit, info.max_model_len) if length is not None]
        return replace(self, context_window_limit=min(lengths, default=None))

    def config(self, info: EngineInfo, parser: str) -> TITOConfig:
        """Return them as Strands' tracer reads them."""
        return {
            "model_id": info.model,
            "backend": info.backend,
            "parser": parser,
            "context_window_limit": self.context_window_limit,
            "sampling": self.sampling.model_dump(),
        }

    def changed(self, info: EngineInfo, changes: Mapping[str, Any]) -> Settings:
        """Return them with changes: sampling parameters by name, all of them by `sampling`, `context_window_limit`.

        Raises:
            ValueError: An unknown name or a bad value.
        """
        for fixed in ("model_id", "backend"):
            if fixed in changes:
                raise ValueError(f"{fixed} is the policy's and cannot change in a rollout: make another model.")
        if "optional_outputs" in changes:
            raise ValueError("wanted is the same in each turn of a rollout: make another model.")
        whole = {name: changes[name] for name in ("sampling", "context_window_limit") if name in changes}
        changed = replace(self, **_checked(whole))
        named = {name: value for name, value in changes.items() if name not in whole}
        return replace(changed, sampling=sampling_params({**changed.sampling.model_dump(), **named})).at(info)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    option.name: option.metadata["check"] for option in fields(Settings) if "check" in option.metadata
}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unknown_option("rollout option", options, _CHECKS)
    return {name: _CHECKS[name](name, value) for name, value in options.items()}
