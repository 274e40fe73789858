"""The options of one rollout: each option's name, type, default, meaning and check."""

# ruff: noqa: RUF009  # `_option` returns a new field for each call

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, Unpack, get_args

from strands.models.model import BaseModelConfig

from tito_core.backend.protocol import NO_OPTIONAL_OUTPUTS, EngineInfo, OnAbort, OptionalOutputs
from tito_core.backend.sampling import SamplingOptions, SamplingParams, check_extra, refuse_unknown_option
from tito_core.backend.values import (
    InvalidValueError,
    at_least,
    checked_names,
    is_text,
    positive_seconds,
    short_repr,
)
from tito_core.ledger.turn import Adapter

MalformedCalls = Literal["feedback", "end_turn", "raise"]
"""What happens to a malformed call: the policy reads the reason, the turn ends as text, or an error is raised."""


class RolloutOptions(TypedDict, total=False):
    """The options of one rollout, as `TITOModel`, `Policy.model` and everything that makes models take them.

    Attributes:
        sampling: Sampling parameters of all turns. Default: those of `SamplingParams`.
        context_window_limit: Context length to use, in tokens. Default: None, the server's own.
        history: What to do when an agent's own history changed. "fork" (default) starts a branch, linked to the turn
            where the history changed. "error" raises `HistoryChangedError` before anything is sent.
        malformed_calls: What to do with a malformed call, which never runs. "feedback" (default) shows the policy the
            reason. "end_turn" ends the turn with the call as text. "raise" raises `MalformedCallError`. The turn is
            committed in each case.
        thinking: What to do with sampled reasoning that the chat template strips from earlier turns. "keep" (default)
            leaves it in the prompt. "as-template" starts a branch from the template's rendering, linked to the turn
            that it left.
        on_abort: What to do with an answer that the server aborts, as trainers request before they change weights.
            "resume" (default) continues the turn from its tokens, at most 16 times. "discard" raises
            `GenerationAbortedError`. "commit" keeps the sampled part as a truncated turn.
        turn_timeout_s: Timeout of a turn's answer in seconds, including pauses, retries and resumed parts. Default:
            None, only the backend's `timeout_s` for each request.
        max_total_tokens: Maximum tokens of a trajectory, prompts and answers together. An answer that would exceed it
            is cut off and ends with `max_tokens`. When none are left, `TotalTokensReachedError` is raised before
            sending. Default: None, only the context length.
        stream: Whether Strands gets reasoning and text while they are sampled; the ledger is the same. Tool calls
            follow when the answer is complete, since a limit may still turn them into text. Default: False.
        optional_outputs: Outputs to request besides tokens and logprobs, such as {"top_logprobs": 5}; see
            `OptionalOutputs`. They become optional columns of the trajectory. Default: none.
        verify_echo: How often the server echoes the prompt's ids, which are compared with those sent. "always"
            (default) is every turn. "first" is the first turn of each path, and those with images in their history; it
            saves the bytes of long contexts.
            The number of prompt tokens that the server counted is compared on every turn (law 4).
        adapter: The LoRA adapter to sample with, by its name on the server or as an `Adapter`. Its effect is measured
            before the policy first samples with it. Default: None, the model alone.
    """

    sampling: SamplingParams | SamplingOptions | None
    context_window_limit: int | None
    history: Literal["fork", "error"]
    malformed_calls: MalformedCalls
    thinking: Literal["keep", "as-template"]
    on_abort: OnAbort
    turn_timeout_s: float | None
    max_total_tokens: int | None
    stream: bool
    optional_outputs: OptionalOutputs | Mapping[str, Any] | None
    verify_echo: Literal["always", "first"]
    adapter: Adapter | str | None


class TITOConfig(BaseModelConfig, total=False):
    """The model's configuration, for Strands and its tracer.

    Attributes:
        model_id: Name of the model on the server.
        backend: Name of the backend.
        parser: Name of the tool-call format.
        sampling: Sampling parameters.
    """

    model_id: str
    backend: str
    parser: str
    sampling: dict[str, Any]


def sampling_params(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Return checked sampling parameters; the defaults for None.

    Raises:
        ValueError: An unknown name or a bad value.
    """
    if isinstance(given, SamplingParams):
        given = dict(given)  # pydantic checks and copies nothing of a `model_copy`
    if given is not None and not isinstance(given, Mapping):
        raise InvalidValueError(f"sampling must be a dict, such as {{'temperature': 0.7}}, not {short_repr(given)}.")
    return SamplingParams(**checked_names("sampling parameter", given or {}, SamplingParams.model_fields))


def _option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    """Return a field with a default and a function that takes the option's name and a value, and returns it checked."""
    return field(default=default, metadata={"check": check})


def _one_of(allowed: Any) -> Any:
    """Return a field that takes a `Literal`'s values; the first is the default."""
    values = get_args(allowed)

    def check(name: str, given: Any) -> Any:
        if given not in values:
            *most, last = map(repr, values)
            raise InvalidValueError(f"{name} must be {', '.join(most)} or {last}, not {short_repr(given)}.")
        return given

    return _option(values[0], check)


def _tokens(name: str, given: Any) -> int | None:
    return None if given is None else at_least(name, given, 1, "a number of tokens, at least 1, or None")


def _seconds(name: str, given: Any) -> float | None:
    return None if given is None else positive_seconds(name, given, "a positive number of seconds, or None")


def _boolean(name: str, given: Any) -> bool:
    if given not in (True, False):
        raise InvalidValueError(f"{name} must be True or False, not {short_repr(given)}.")
    return bool(given)


def _adapter(given: Any) -> Adapter | None:
    adapter = Adapter(given) if isinstance(given, str) else given
    if adapter is None:
        return None
    if not isinstance(adapter, Adapter) or not is_text(adapter.name) or not adapter.name:
        raise InvalidValueError(f"adapter must be a name, an Adapter(name, version) or None, not {short_repr(given)}.")
    if "@" in adapter.name:
        raise InvalidValueError(f"adapter {adapter.name!r} has '@', which stands before versions: give another name.")
    if not (adapter.version is None or is_text(adapter.version)) or type(adapter.fresh) is not bool:
        raise InvalidValueError(
            f"version must be a string or None, and fresh a boolean, not as in {short_repr(given)}."
        )
    return adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked options of one rollout. Build them with `Settings.of`; `RolloutOptions` documents each.

    Attributes:
        reports_ids: Whether the event that ends a message holds the ids of its prompt and answer, for callbacks.
        runs_calls: Whether Strands gets the policy's calls as tool calls. If False they stay text, unless a call was
            forced.
    """

    sampling: SamplingParams = _option(SamplingParams(), lambda _, given: sampling_params(given))
    context_window_limit: int | None = _option(None, _tokens)
    history: Literal["fork", "error"] = _one_of(Literal["fork", "error"])
    malformed_calls: MalformedCalls = _one_of(MalformedCalls)
    thinking: Literal["keep", "as-template"] = _one_of(Literal["keep", "as-template"])
    on_abort: OnAbort = _one_of(OnAbort)
    turn_timeout_s: float | None = _option(None, _seconds)
    max_total_tokens: int | None = _option(None, _tokens)
    stream: bool = _option(False, _boolean)
    optional_outputs: OptionalOutputs = _option(NO_OPTIONAL_OUTPUTS, lambda _, given: OptionalOutputs.of(given))
    verify_echo: Literal["always", "first"] = _one_of(Literal["always", "first"])
    adapter: Adapter | None = _option(None, lambda _, given: _adapter(given))
    reports_ids: bool = False
    runs_calls: bool = True

    @classmethod
    def of(cls, **options: Unpack[RolloutOptions]) -> Settings:
        """Check options and return them as settings.

        Raises:
            InvalidValueError: An unknown name, or a bad value.
        """
        return cls(**_checked(options))

    def at(self, info: EngineInfo) -> Settings:
        """Return the settings for a server: its context length is the upper limit.

        Raises:
            InvalidValueError: The engine does not take a field in `extra`.
            UnsupportedByServerError: The server cannot give the optional outputs, apply the grammar, or take adapters.
                The error names the server's option for them.
        """
        check_extra(self.sampling, info.extra_fields, backend=info.backend)
        info.capabilities.check(self.optional_outputs, self.sampling, backend=info.backend)
        info.capabilities.check_adapter(self.adapter, backend=info.backend)
        lengths = [length for length in (self.context_window_limit, info.max_model_len) if length is not None]
        return replace(self, context_window_limit=min(lengths, default=None))

    def config(self, info: EngineInfo, parser: str) -> TITOConfig:
        """Return the configuration for Strands and its tracer."""
        return {
            "model_id": info.model,
            "backend": info.backend,
            "parser": parser,
            "context_window_limit": self.context_window_limit,
            "sampling": self.sampling.model_dump(),
        }

    def changed(self, info: EngineInfo, changes: Mapping[str, Any]) -> Settings:
        """Return changed settings: sampling parameters by name, or `sampling` as a whole, and `context_window_limit`.

        Raises:
            ValueError: An unknown name or a bad value.
        """
        for fixed in ("model_id", "backend"):
            if fixed in changes:
                raise ValueError(
                    f"{fixed} cannot change in a rollout, since it belongs to the policy. Make another model."
                )
        for fixed in ("optional_outputs", "adapter"):
            if fixed in changes:
                raise ValueError(f"{fixed} cannot change in a rollout. Make another model.")
        options = {name: changes[name] for name in ("sampling", "context_window_limit") if name in changes}
        changed = replace(self, **_checked(options))
        parameters = {name: value for name, value in changes.items() if name not in options}
        return replace(changed, sampling=sampling_params({**changed.sampling.model_dump(), **parameters})).at(info)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    option.name: option.metadata["check"] for option in fields(Settings) if "check" in option.metadata
}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unknown_option("rollout option", options, _CHECKS)
    return {name: _CHECKS[name](name, value) for name, value in options.items()}
