"""A `TITOModel` that is made without a server and connects at its first turn, as the models of other providers do.

`LazyModel` is what `SGLangModel` and `VLLMModel` share: it shows the rollout as lists. Models of one server share a
policy (`SharedPolicies`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from strands.types.content import Messages, SystemContentBlock
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolSpec

from tito_compat.rollout import Rollout
from tito_core.ledger.ledger import Ledger
from tito_core.model import Policy, SeveralTrajectoriesError, TITOModel
from tito_core.settings import Settings, TITOConfig

M = TypeVar("M", bound=BaseModel)
UNKNOWN_TOOL_NAME = "unknown_tool"
"""The key of calls that do not name a tool for certain."""
_SET_ON_CONNECT = frozenset({"_policy", "_settings", "_recording"})
_RENAMED = {
    "sampling_seed": "seed",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
_TEXT_ONLY = frozenset(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"))
"""Options of the response's text, which is not used: only ids are read."""


class LazyModel(TITOModel):
    """A model of one rollout that connects when the policy is first needed, and shows the rollout as lists.

    Args:
        connect: Returns the policy. It blocks until the server has answered.
        settings: The rollout's checked settings.
    """

    def __init__(self, connect: Callable[[], Policy], settings: Settings) -> None:
        self._connect = connect
        self._requested = settings  # before they are limited to what the server offers
        self._connect_lock = threading.Lock()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Connect when an attribute of a connected model is read. This blocks a running event loop."""
            if name not in _SET_ON_CONNECT:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self._ensure_connected()
            return self.__dict__[name]

    @property
    def is_connected(self) -> bool:
        """Whether the model has connected to its server."""
        return "_recording" in self.__dict__  # set last

    def __repr__(self) -> str:
        return super().__repr__() if self.is_connected else f"<{type(self).__name__}: not connected>"

    async def connected(self) -> Policy:
        """Connect if necessary, and return the policy.

        Raises:
            TokenizerError, TemplateError, DetectionError, BackendError: As `Policy.connect`.
        """
        if not self.is_connected:
            await asyncio.to_thread(self._ensure_connected)
        return self.policy

    def _ensure_connected(self) -> None:
        with self._connect_lock:
            if not self.is_connected:
                self._begin(self._connect(), None, self._requested)

    @property
    def config(self) -> TITOConfig:
        """The configuration, for Strands and its tracer."""
        if self.is_connected:
            return super().config
        return {
            "context_window_limit": self._requested.context_window_limit,
            "sampling": self._requested.sampling.model_dump(),
        }

    @property
    def rollout(self) -> Rollout:
        """The rollout so far, copied out of the ledger; turns of `structured_output` are not part of it.

        Raises:
            SeveralTrajectoriesError: A history was edited, retried or shared. Use `rollouts`.
        """
        rollouts = self.rollouts
        if len(rollouts) > 1:
            raise SeveralTrajectoriesError(
                "The rollout has several trajectories because a history was edited, retried or shared. Use "
                f"model.rollouts, a list.\n{self.ledger.tree()}"
            )
        return rollouts[0] if rollouts else Rollout()

    @property
    def token_manager(self) -> Rollout:
        """The rollout, by its older name."""
        return self.rollout

    @property
    def rollouts(self) -> list[Rollout]:
        """One rollout per trajectory; each sampled token is trained in exactly one."""
        return [Rollout.of(each) for each in self.trajectories] if self.is_connected else []

    @property
    def tool_parse_errors(self) -> dict[str, int]:
        """Number of malformed calls by tool; "unknown_tool" for calls that do not name one for certain."""
        counts = {
            tool or UNKNOWN_TOOL_NAME: sum(calls.malformed.values())
            for tool, calls in (self.parse_report.tools.items() if self.is_connected else ())
        }
        return {tool: count for tool, count in counts.items() if count}

    def reset(self) -> Ledger:
        """Return the ledger and start the next one."""
        return super().reset() if self.is_connected else Ledger().seal()

    def stream(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[StreamEvent]:
        """Connect if necessary and run one turn; see `TITOModel.stream`."""
        return self._run_turn(messages, tool_specs, system_prompt, options)

    async def _run_turn(
        self, messages: Messages, tool_specs: list[ToolSpec] | None, system_prompt: str | None, options: dict[str, Any]
    ) -> AsyncGenerator[StreamEvent]:
        await self.connected()
        async with aclosing(super().stream(messages, tool_specs, system_prompt, **options)) as events:
            async for event in events:
                yield event

    async def structured_output(
        self, output_model: type[M], prompt: Messages, system_prompt: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[dict[str, M | Any]]:
        """Sample a JSON object; see `TITOModel.structured_output`. Its turn has a ledger of its own, which is dropped.

        The one event is the output, as it is with the other providers.
        """
        alone = TITOModel.with_settings(await self.connected(), None, self._settings)
        async with aclosing(alone.structured_output(output_model, prompt, system_prompt, **kwargs)) as events:
            async for event in events:
                if "output" in event:
                    yield event

    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
    ) -> int:
        """Connect if necessary and count the tokens of a history; see `TITOModel.count_tokens`."""
        await self.connected()
        return await super().count_tokens(messages, tool_specs, system_prompt, system_prompt_content)


def rollout_settings(params: Mapping[str, Any], options: Mapping[str, Any]) -> Settings:
    """Return the settings of a rollout from sampling parameters by a provider's names, and from our own options.

    A parameter that is None is not set. Names that `SamplingParams` does not know are refused.

    Raises:
        ValueError: An unknown name, a bad value, or sampling parameters in both.
    """
    sampling = {
        _RENAMED.get(name, name): value
        for name, value in params.items()
        if value is not None and name not in _TEXT_ONLY
    }
    if sampling and options.get("sampling"):
        raise ValueError(f"sampling and {', '.join(sampling)} both set sampling parameters. Use one of the two.")
    choices: Any = {**options, "sampling": sampling} if sampling else dict(options)
    return Settings.of(**choices)


class SharedPolicies:
    """Policies by the arguments they were made with. Thread-safe. A failed attempt is not remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._policies: dict[Hashable, Policy] = {}

    def get(self, key: Hashable, make: Callable[[], Policy]) -> Policy:
        """Return the policy of a key. The first caller makes it while other callers of the key wait.

        Args:
            key: All arguments that the policy depends on.
            make: Makes the policy. It blocks until the server has answered.
        """
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._policies:
                self._policies[key] = make()
            return self._policies[key]
