"""A rollout's settings: what users may write, checked where they write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

from strands.models.model import BaseModelConfig
from strands.types.content import SystemContentBlock
from strands.types.tools import ToolSpec

from tito_core import budget, malformed
from tito_core.backend.aborts import MAX_RESUMES, Aborts, OnAbort
from tito_core.backend.protocol import EngineInfo
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.typed_values import InvalidValueError, at_least, positive_seconds, shown
from tito_core.backend.unknown_names import checked_names, refuse_unknown
from tito_core.backend.wanted import NOTHING_WANTED, Wanted
from tito_core.chat.message_check import check_system_blocks
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.malformed import MalformedCalls


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


class Choices(TypedDict, total=False):
    """What may be chosen for one rollout; `TITOModel` says what each means."""

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
    wanted: Wanted | Mapping[str, Any] | None
    verify_echo: Literal["always", "first"]


class SeveralTrajectoriesError(LookupError):
    """The ledger holds no trajectory, or several."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user of one rollout chose, checked.

    Attributes:
        sampling: Sampling parameters of all turns.
        context_limit: Tokens of context to use, at most the server's own; None when neither says.
        may_branch: Whether an agent's changed history makes a branch, rather than an error.
        malformed_calls: What becomes of malformed calls.
        keeps_thinking: Whether sampled reasoning stays in the prompt where the template would strip it.
        aborts: What becomes of an answer that the engine was told to abort.
        turn_timeout_s: Longest wait for a turn's answer in seconds, with everything; None leaves it to the backend.
        max_total_tokens: Most tokens of a trajectory, prompts and answers; None for no bound but the context.
        streams: Whether Strands gets text while it comes.
        wanted: What is asked of the engine beside sampled tokens and their logprobs, fixed for the rollout.
        echoes_every_turn: Whether the server is asked for every prompt's ids, or only for those that begin a path.
        reports_ids: Whether the event that ends a message carries the ids of its prompt and answer, for callbacks.
        runs_calls: Whether Strands gets the policy's calls as calls; else they are text, unless one was forced.
    """

    sampling: SamplingParams
    context_limit: int | None
    may_branch: bool
    malformed_calls: MalformedCalls = "feedback"
    keeps_thinking: bool = True
    aborts: Aborts = Aborts()  # noqa: RUF009  # frozen
    turn_timeout_s: float | None = None
    max_total_tokens: int | None = None
    streams: bool = False
    wanted: Wanted = NOTHING_WANTED
    echoes_every_turn: bool = True
    reports_ids: bool = False
    runs_calls: bool = True

    @classmethod
    def of(
        cls,
        *,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        context_window_limit: int | None = None,
        history: str = "fork",
        malformed_calls: str = "feedback",
        thinking: str = "keep",
        on_abort: OnAbort = "resume",
        max_resumes: int = MAX_RESUMES,
        turn_timeout_s: float | None = None,
        max_total_tokens: int | None = None,
        stream: bool = False,
        wanted: Wanted | Mapping[str, Any] | None = None,
        verify_echo: str = "always",
    ) -> Settings:
        """Check what a user wrote.

        Raises:
            ValueError: A bad value.
        """
        return cls(
            sampling_params(sampling),
            context_limit(context_window_limit, None),
            may_branch(history),
            malformed.checked(malformed_calls),
            keeps_thinking(thinking),
            Aborts(on_abort, max_resumes),
            seconds("turn_timeout_s", turn_timeout_s),
            budget.checked(max_total_tokens),
            boolean("stream", stream),
            Wanted.of(wanted),
            echoes_every_turn(verify_echo),
        )

    def at(self, info: EngineInfo) -> Settings:
        """Give them for a server: at most its context length.

        Raises:
            UnsupportedByServerError: It cannot give what is wanted; the sentence names the option to start it with.
        """
        info.capabilities.check(self.wanted, self.sampling, backend=info.backend)
        return replace(self, context_limit=context_limit(self.context_limit, info.max_model_len))

    def config(self, info: EngineInfo, parser: str) -> TITOConfig:
        """Give them as Strands' tracer reads them."""
        return {
            "model_id": info.model,
            "backend": info.backend,
            "parser": parser,
            "context_window_limit": self.context_limit,
            "sampling": self.sampling.model_dump(),
        }

    def changed(self, info: EngineInfo, changes: Mapping[str, Any]) -> Settings:
        """Give them with changes: sampling parameters by name, all of them by `sampling`, `context_window_limit`.

        Raises:
            ValueError: An unknown name or a bad value.
        """
        for fixed in ("model_id", "backend"):
            if fixed in changes:
                raise ValueError(f"{fixed} is the policy's and cannot change in a rollout: make another model.")
        if "wanted" in changes:
            raise ValueError("wanted is the same in each turn of a rollout: make another model.")
        base = sampling_params(changes.get("sampling", self.sampling))
        named = {key: value for key, value in changes.items() if key not in ("sampling", "context_window_limit")}
        changed = replace(
            self,
            sampling=sampling_params({**base.model_dump(), **named}),
            context_limit=changes.get("context_window_limit", self.context_limit),
        )
        return changed.at(info)


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


def check_choices(given: Mapping[str, Any]) -> None:
    """Check the names of what a user chose for a rollout.

    Raises:
        InvalidValueError: One is not known; the sentence says where a sampling parameter goes, or names the nearest.
    """
    for name in given:
        if name in SamplingParams.model_fields:
            raise InvalidValueError(f"{name} is a sampling parameter: give it as sampling={{{name!r}: ...}}.")
    refuse_unknown("setting of a rollout named", given, Choices.__annotations__)


def boolean(name: str, given: bool) -> bool:
    """Check a setting that is on or off.

    Raises:
        ValueError: It is neither True nor False.
    """
    if given not in (True, False):
        raise InvalidValueError(f"{name} must be True or False, not {shown(given)}.")
    return bool(given)


def system_text(system_prompt: str | None, content: list[SystemContentBlock] | None) -> str | None:
    """Give the system prompt as text; its blocks are joined by newlines, as Strands joins them.

    Raises:
        InvalidMessageError: The blocks do not have Strands' form.
    """
    if system_prompt is not None or content is None:
        return system_prompt
    check_system_blocks(content)
    return "\n".join(block["text"] for block in content if "text" in block) or None


def may_branch(history: str) -> bool:
    """Read the `history` setting.

    Raises:
        ValueError: It is neither "fork" nor "error".
    """
    if history not in ("fork", "error"):
        raise InvalidValueError(f"history must be 'fork' or 'error', not {shown(history)}.")
    return history == "fork"


def keeps_thinking(thinking: str) -> bool:
    """Read the `thinking` setting.

    Raises:
        ValueError: It is neither "keep" nor "as-template".
    """
    if thinking not in ("keep", "as-template"):
        raise InvalidValueError(f"thinking must be 'keep' or 'as-template', not {shown(thinking)}.")
    return thinking == "keep"


def seconds(name: str, given: float | None) -> float | None:
    """Check a time that may be None.

    Raises:
        ValueError: It is no positive number of seconds.
    """
    return None if given is None else positive_seconds(name, given, "a positive number of seconds, or None")


def echoes_every_turn(verify_echo: str) -> bool:
    """Read the `verify_echo` setting.

    Raises:
        ValueError: It is neither "always" nor "first".
    """
    if verify_echo not in ("always", "first"):
        raise InvalidValueError(f"verify_echo must be 'always' or 'first', not {shown(verify_echo)}.")
    return verify_echo == "always"


def refuse_reserved_name(tool_specs: list[ToolSpec] | None) -> None:
    """Refuse a tool under the name by which malformed calls are reported, which must stay unknown to Strands."""
    for spec in tool_specs or ():
        if spec["name"] == MALFORMED_CALL:
            raise ValueError(
                f"A tool is named {MALFORMED_CALL!r}, the name under which malformed calls are reported: rename it."
            )


def context_limit(wanted: int | None, served: int | None) -> int | None:
    """Give the context length to use: what is wanted, at most the server's own, which None stands for."""
    if wanted is None:
        return served
    at_least("context_window_limit", wanted, 1, "a number of tokens, at least 1")
    return wanted if served is None else min(wanted, served)
