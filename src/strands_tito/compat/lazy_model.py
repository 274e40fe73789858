"""A `TITOModel` that is built without a server, as other providers' models are, and connects at its first turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from strands.types.content import Messages, SystemContentBlock
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolSpec

from strands_tito.compat.rollout import Rollout
from tito_core.backend.errors import BackendError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Turn
from tito_core.model import Policy, SeveralTrajectoriesError, TITOModel
from tito_core.policy import bind
from tito_core.settings import Settings

_OF_THE_POLICY = frozenset({"policy", "_settings", "_recording"})


class LazyModel(TITOModel):
    """A model of one rollout whose policy is asked for when it is first needed, and the rollout as lists.

    Args:
        connect: Gives the policy; it blocks until the server has answered.
        chosen: The rollout's settings, checked.
    """

    def __init__(self, connect: Callable[[], Policy], chosen: Settings) -> None:
        self._connect = connect
        self._chosen = chosen
        self._connecting = threading.Lock()
        self._viewing = threading.Lock()
        self._rollout = Rollout()
        self._viewed = 0  # turns that are in it
        self._is_viewed = False  # once somebody holds it, it grows
        self.rollout_history: list[Rollout] = []

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Connect when what only a connected model has is read; inside a running loop this blocks it."""
            if name not in _OF_THE_POLICY:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self._ready()
            return self.__dict__[name]

    @property
    def is_connected(self) -> bool:
        """Whether the server was asked what it is."""
        return "_recording" in self.__dict__  # what is set last

    async def connected(self) -> Policy:
        """Connect, unless that is done, and give the policy.

        Raises:
            TokenizerError, TemplateError, DetectionError, BackendError: Each a sentence.
        """
        if not self.is_connected:
            await asyncio.to_thread(self._ready)
        return self.policy

    def _ready(self) -> None:
        with self._connecting:
            if not self.is_connected:
                try:
                    policy = self._connect()
                    self._chosen.at(policy.info)
                except BackendError as error:
                    raise self._told(error) from error.__cause__
                self._begin(policy, None, self._chosen)

    def _choose(self, chosen: Settings) -> None:
        """Take other settings, which may not change what the ledger's turns have in common."""
        if self.is_connected and chosen.optional_outputs != self._settings.optional_outputs:
            raise ValueError("What is asked for beside tokens is the same in each turn of a rollout: make a new model.")
        self._chosen = chosen
        if self.is_connected:
            self._settings = chosen.at(self.policy.info)

    def _told(self, error: BackendError) -> BackendError:
        """Give an engine's error under the name that users of the provider know."""
        return error

    @property
    def rollout(self) -> Rollout:
        """The rollout so far, one object until `reset`, which grows with each turn.

        Raises:
            SeveralTrajectoriesError: A history was edited, retried or shared, so there are several: `rollouts`.
        """
        self._is_viewed = True
        if self.is_connected and len(self.ledger):
            if len(self.ledger.leaves()) > 1:
                said = "The rollout has several trajectories, since a history was edited, retried or shared."
                raise SeveralTrajectoriesError(f"{said} Use model.rollouts, a list.\n{self.ledger.tree()}")
            self._grow()
        return self._rollout

    @property
    def token_manager(self) -> Rollout:
        """The rollout, by its older name."""
        return self.rollout

    @property
    def rollouts(self) -> list[Rollout]:
        """A rollout for each trajectory; each sampled token is trained in exactly one."""
        return _rollouts(self.ledger) if self.is_connected else []

    @property
    def tool_parse_errors(self) -> dict[str, int]:
        """Malformed calls of this rollout by the tool they name; "unknown_tool" where they do not say for certain."""
        if not self.is_connected:
            return {}
        counted = ((name or "unknown_tool", sum(of.malformed.values())) for name, of in self.parse_report.tools.items())
        return {name: faults for name, faults in counted if faults}

    def reset(self) -> Ledger:
        """Give the ledger and start the next one; what it holds is kept in `rollout_history`."""
        if not self.is_connected:
            return Ledger().seal()
        with self._viewing:
            ledger = super().reset()
            rollouts = _rollouts(ledger)
            if len(rollouts) == 1 and rollouts[0] == self._rollout:
                rollouts = [self._rollout]
            self.rollout_history += rollouts
            self._rollout, self._viewed, self._is_viewed = Rollout(), 0, False
        return ledger

    def stream(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        **asked: Any,
    ) -> AsyncGenerator[StreamEvent]:
        """Run one turn, connected first; see `TITOModel.stream`."""
        return self._turn(messages, tool_specs, system_prompt, asked)

    async def _turn(
        self, messages: Messages, tool_specs: list[ToolSpec] | None, system_prompt: str | None, asked: dict[str, Any]
    ) -> AsyncGenerator[StreamEvent]:
        await self.connected()
        try:
            async with aclosing(super().stream(messages, tool_specs, system_prompt, **asked)) as events:
                async for event in events:
                    yield event
        except BackendError as error:
            raise self._told(error) from error.__cause__
        if self._is_viewed and len(self.ledger.leaves()) == 1:
            self._grow()

    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
    ) -> int:
        """Count the tokens of a history, connected first."""
        await self.connected()
        return await super().count_tokens(messages, tool_specs, system_prompt, system_prompt_content)

    def _grow(self) -> None:
        """Take the turns of the only path that came since: what a turn costs grows with what is new (law 14)."""
        with self._viewing:
            path = self._only_path()
            for turn in path[self._viewed :]:
                self._rollout.add_turn(turn)
            self._viewed = len(path)

    def _only_path(self) -> Sequence[Turn]:
        return self.ledger.path(self.ledger.leaves()[0])


def _rollouts(ledger: Ledger) -> list[Rollout]:
    return [Rollout.of(trajectory) for trajectory in ledger.iter_trajectories()]


def check_tokenizer(tokenizer: Any, parser: str, template_arguments: dict[str, Any]) -> None:
    """Certify the template of a tokenizer that is there already, so that one that is not sound is refused at once.

    A name is loaded at the first turn, and so is found out what an object of another class is, such as a stand-in of a
    test that asks for no turn.

    Raises:
        TemplateError, DetectionError: As `Policy.connect`.
    """
    if isinstance(tokenizer, str):
        return
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        bind(tokenizer, parser, template_arguments=template_arguments)
