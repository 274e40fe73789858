"""`TITOModel`: the Strands model provider that records every token for training."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack, cast

from pydantic import BaseModel, ValidationError
from strands.models.model import Model
from strands.types.content import Messages, SystemContentBlock
from strands.types.exceptions import StructuredOutputException
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolChoice, ToolSpec

from tito_core.backend.protocol import Backend
from tito_core.backend.registry import one_model
from tito_core.backend.values import InvalidValueError
from tito_core.chat.certify import Certificate
from tito_core.chat.encoder import LONG_TEXT
from tito_core.chat.message_check import check_messages, check_opening
from tito_core.ledger.errors import TITOError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory
from tito_core.policy import CONNECTED_TO, PolicyOptions, PolicyParts, check_arguments, refuse_elsewhere
from tito_core.settings import RolloutOptions, Settings, TITOConfig
from tito_core.turn.answer import ParseReport
from tito_core.turn.inputs import TurnInput, check_output_model, system_text
from tito_core.turn.recording import Recording
from tito_core.turn.run import run_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

M = TypeVar("M", bound=BaseModel)


class ModelOptions(RolloutOptions, PolicyOptions, total=False):
    """The options of a model that connects its own policy: those of a rollout, a policy and a backend."""


class SeveralTrajectoriesError(TITOError, LookupError):
    """The ledger does not hold exactly one trajectory."""


class Policy(PolicyParts):
    """The parts that all rollouts of one policy share; for its attributes see `PolicyParts`.

    Make one with `Policy.connect`, and with `model()` a model for each rollout. `async with` closes its connections.
    """

    __slots__ = ()

    def model(self, *, ledger: Ledger | None = None, **options: Unpack[RolloutOptions]) -> TITOModel:
        """Make the Strands model of one rollout.

        Args:
            ledger: See `TITOModel`.
            **options: See `RolloutOptions`.
        """
        others = [*PolicyOptions.__annotations__, *CONNECTED_TO]
        refuse_elsewhere(
            "policy.model", options, RolloutOptions.__annotations__, others, "of a policy", "Policy.connect"
        )
        return TITOModel.of(self, ledger, **options)

    async def aclose(self) -> None:
        """Close this event loop's connections, when the aborts of its requests have reached the server.

        The policy can go on: the next request opens new ones. `async with` calls it at its end.
        """
        await self.backend.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class TITOModel(Model):
    """A Strands model over one policy, with a ledger of every token.

    Args:
        backend: "vllm", "sglang", another installed backend's name, or a backend object.
        base_url: The server's address, such as "http://localhost:8000" or "unix:///run/vllm.sock", or that of a
            router before several servers.
        tokenizer: Name or folder of the model's tokenizer, or the object.
        ledger: The ledger to write to. Default: None, a new ledger, or with a store the one that the first agent's
            restored session names.
        **options: Those of a rollout, such as `sampling` and `history` (`RolloutOptions`), of the policy, such as
            `parser` and `store` (`PolicyOptions`), and of the backend, such as `model_id`, `api_key` and `timeout_s`
            (`BackendOptions`).

    Raises:
        InvalidValueError: An unknown option, or a bad value. The error suggests the nearest name. Or `ledger` records
            that content is inert, and the policy has `content_tokens="as-template"`.
        Exception: The errors of `Policy.connect`.
    """

    # With it Strands leaves the tool list unchanged and passes the model whose JSON schema constrains the answer.
    _supports_structured_output = True

    def __init__(
        self,
        *,
        backend: str | Backend,
        base_url: str = "",
        tokenizer: str | PreTrainedTokenizerBase,
        ledger: Ledger | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        known = [*ModelOptions.__annotations__, *CONNECTED_TO, "ledger"]
        check_arguments("TITOModel", options, known, backend)
        one_model(options)
        policy_options: dict[str, Any] = dict(options)
        rollout: Any = {name: policy_options.pop(name) for name in RolloutOptions.__annotations__ if name in options}
        settings = Settings.of(**rollout)  # before connecting, so that bad input fails at once
        policy = Policy.connect(backend=backend, base_url=base_url, tokenizer=tokenizer, **policy_options)
        self._begin(policy, ledger, settings)

    @classmethod
    def of(cls, policy: Policy, ledger: Ledger | None = None, **options: Unpack[RolloutOptions]) -> TITOModel:
        """Make the model of one rollout from a shared policy."""
        return cls.with_settings(policy, ledger, Settings.of(**options))

    @classmethod
    def with_settings(cls, policy: Policy, ledger: Ledger | None, settings: Settings) -> TITOModel:
        """Make the model of one rollout from a shared policy and checked options."""
        model = cls.__new__(cls)
        model._begin(policy, ledger, settings)
        return model

    def _begin(self, policy: Policy, ledger: Ledger | None, settings: Settings) -> None:
        if not isinstance(policy, Policy):
            kind = type(policy).__name__
            raise InvalidValueError(f"policy must be a Policy, as Policy.connect returns it, not of type {kind}.")
        if ledger is not None and not isinstance(ledger, Ledger):
            kind = type(ledger).__name__
            raise InvalidValueError(f"ledger must be a Ledger, or None for a new one, not of type {kind}.")
        self._policy = policy
        self._settings = settings.at(policy.info)
        if settings.adapter is not None:
            policy._adapters.admit(settings.adapter)
        self._recording = Recording(policy, ledger)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.policy.server}: {self.ledger!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A model cannot be copied or pickled, since it holds connections to the server. Send model.ledger or "
            "model.trajectories; or send the model's arguments and make a model in the other process."
        )

    @property
    def config(self) -> TITOConfig:
        """The configuration, for Strands and its tracer."""
        return self._settings.config(self.policy.info, self.policy.detected.name)

    def get_config(self) -> TITOConfig:
        """Return the configuration."""
        return self.config

    def update_config(self, **model_config: Any) -> None:
        """Change sampling parameters by name, or `sampling` as a whole, or `context_window_limit`.

        Raises:
            ValueError: An unknown name or a bad value; nothing is changed.
        """
        self._settings = self._settings.changed(self.policy.info, model_config)

    @property
    def policy(self) -> Policy:
        """The policy that every turn of this rollout is sampled from; another one needs another model."""
        return self._policy

    @property
    def certificate(self) -> Certificate:
        """The evidence that the chat template's deltas are right (law 7)."""
        return self.policy.template.certificate

    @property
    def ledger(self) -> Ledger:
        """The record of this rollout. Every turn is committed to it.

        A restored session's takes its place at the agent's first turn, with the rollout's annotations so far.
        """
        return self._recording.ledger

    @property
    def trajectories(self) -> list[Trajectory]:
        """Every root-to-leaf path of the ledger; each sampled token is trained in exactly one."""
        return self.ledger.trajectories

    @property
    def trajectory(self) -> Trajectory:
        """The ledger's only trajectory.

        Raises:
            SeveralTrajectoriesError: There is none yet, or there are several; the error shows them.
        """
        trajectories = self.trajectories
        if len(trajectories) == 1:
            return trajectories[0]
        if not trajectories:
            raise SeveralTrajectoriesError("The ledger holds no turn yet. Run the agent first.")
        raise SeveralTrajectoriesError(
            f"The ledger holds {len(trajectories)} trajectories, since a history was edited, retried or shared. "
            f"Use model.trajectories.\n{self.ledger.tree()}"
        )

    @property
    def parse_report(self) -> ParseReport:
        """Counts of the rollout's well-formed and malformed calls, by tool."""
        return ParseReport.of(self.ledger)

    def reset(self) -> Ledger:
        """Return the ledger, sealed, and start the next one.

        Reset between runs: a turn in flight belongs to the ledger in which it began.
        """
        return self._recording.next()

    def stream(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        *,
        tool_choice: ToolChoice | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
        cancel_signal: threading.Event | None = None,
        structured_output_model: type[BaseModel] | None = None,
        model_state: dict[str, Any] | None = None,
        dynamic_trailing_blocks: int = 0,
        invocation_state: dict[str, Any] | None = None,
        **_: Any,
    ) -> AsyncGenerator[StreamEvent]:
        """Run one turn: prepare, generate, yield its events, and commit it when the consumer has taken all of them.

        The last `dynamic_trailing_blocks` blocks of the last message, which Strands injects for this call only, are in
        the prompt and stay in the path's tokens. They are not part of the history by which the next turn is found.

        Raises:
            InvalidMessageError: The messages, tools or system prompt do not have Strands' form.
            UnsupportedContentError: A message holds content that cannot become tokens, such as a video.
            ContextLengthError: The history does not fit. It is also Strands' `ContextWindowOverflowException`.
            TrimmedHistoryError: The chat template cannot show a history of which a message was removed.
            TotalTokensReachedError: No token of `max_total_tokens` is left; nothing was sent.
            ThrottledError: The engine stayed overloaded through every retry. Strands does not retry it.
            TurnNotStoredError: The store could not write the turn.
            MalformedCallError: A call is malformed, with `malformed_calls="raise"`. The turn is committed.
            UnsupportedToolChoiceError: The parser has no grammar for the forced tool call.
            BackendError: Another failure of the engine. The ledger is unchanged.
        """
        began = time.monotonic()
        turn_input = TurnInput.of(
            messages,
            system_text(system_prompt, system_prompt_content),
            tool_specs,
            tool_choice,
            structured_output_model,
            model_state,
            cancel_signal,
            dynamic_trailing_blocks,
            invocation_state,
        )
        return run_turn(self.policy, self._recording, self._settings, turn_input, began)

    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
    ) -> int:
        """Count the tokens of a history with the policy's own template and tokenizer.

        With `system_prompt` and `tool_specs` None, messages are counted as an addition to a longer history. Strands
        calls it so before every turn but the first, with the new messages.
        """
        system, template = system_text(system_prompt, system_prompt_content), self.policy.template
        check_opening(messages, system, tool_specs)
        characters = check_messages(messages)
        count = partial(template.count_tokens, messages, system, tool_specs)
        if system is None and tool_specs is None:
            count = partial(template.added_tokens, messages)
        return count() if characters < LONG_TEXT else await asyncio.to_thread(count)

    async def structured_output(
        self, output_model: type[M], prompt: Messages, system_prompt: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[dict[str, M | Any]]:
        """Sample a JSON object under the model's schema; its tokens are `CONSTRAINED`.

        Yields:
            The events of `stream`, then {"output": the validated object}.

        Raises:
            StructuredOutputException: The answer does not validate, as when the token limit cut it off.
        """
        check_output_model(output_model)
        texts: list[str] = []
        async for event in self.stream(prompt, None, system_prompt, structured_output_model=output_model, **kwargs):
            texts.append(cast(dict[str, Any], event).get("contentBlockDelta", {}).get("delta", {}).get("text", ""))
            yield cast(dict[str, Any], event)
        try:
            output = output_model.model_validate_json("".join(texts))
        except ValidationError as error:  # cut off by the token limit, or a constraint that grammars cannot express
            raise StructuredOutputException(
                f"The answer is not a valid {output_model.__name__} ({error.errors()[0]['msg']}). Raise "
                f"max_new_tokens, or loosen the schema. The answer starts with {''.join(texts)[:200]!r}."
            ) from error
        yield {"output": output}
