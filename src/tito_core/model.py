"""`TITOModel`: the Strands model provider in which the tokens a policy samples are the tokens it is trained on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack, cast

from pydantic import BaseModel, ValidationError
from strands.models.model import Model
from strands.types.content import Messages, SystemContentBlock
from strands.types.exceptions import StructuredOutputException
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolChoice, ToolSpec

from tito_core.backend.protocol import Backend
from tito_core.backend.typed_values import InvalidValueError
from tito_core.chat.certificate import Certificate
from tito_core.chat.message_check import check_messages, check_opening
from tito_core.chat.word_cache import LONG_TEXT
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory
from tito_core.policy import PolicyOptions, check_arguments, connect, run_blocking
from tito_core.settings import RolloutOptions, Settings, TITOConfig
from tito_core.turn.call_report import ParseReport
from tito_core.turn.commit import Recording
from tito_core.turn.inputs import TurnInput, check_output_model, system_text
from tito_core.turn.policy_parts import PolicyParts
from tito_core.turn.run import run_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

M = TypeVar("M", bound=BaseModel)
CONNECTED_TO = ("backend", "base_url", "tokenizer")


class ModelOptions(RolloutOptions, PolicyOptions, total=False):
    """The options of a model that connects a policy of its own: a rollout's, a policy's and a backend's."""


class SeveralTrajectoriesError(LookupError):
    """The ledger holds no trajectory, or several."""


@dataclass(frozen=True, slots=True)
class Policy(PolicyParts):
    """What all rollouts of one policy share. Make one with `Policy.connect`, and a model a rollout with `model()`.

    Its attributes are those of `PolicyParts`.
    """

    @classmethod
    def connect(
        cls,
        *,
        backend: str | Backend,
        base_url: str | Sequence[str] = "",
        tokenizer: str | PreTrainedTokenizerBase,
        **options: Unpack[PolicyOptions],
    ) -> Policy:
        """Do `connect_async` from synchronous code. It blocks; inside a running loop, await `connect_async` instead."""
        return run_blocking(cls.connect_async(backend=backend, base_url=base_url, tokenizer=tokenizer, **options))

    @classmethod
    async def connect_async(
        cls,
        *,
        backend: str | Backend,
        base_url: str | Sequence[str] = "",
        tokenizer: str | PreTrainedTokenizerBase,
        **options: Unpack[PolicyOptions],
    ) -> Policy:
        """Load the tokenizer, check its template, ask the server what it is, and measure what its logprobs mean.

        Each of these stages is logged at INFO by `tito_core.policy` as it begins. Nothing that a server said or that
        was measured is kept for the next call, since a restart may change it.

        Args:
            backend: A name such as "vllm" or "sglang", or a backend object.
            base_url: Address of the server, such as "http://localhost:8000" or "unix:///run/vllm.sock", or a list of
                the addresses of equal servers, over which rollouts are spread.
            tokenizer: Name or folder of the model's tokenizer, or the object.
            **options: See `PolicyOptions` and `BackendOptions`.

        Raises:
            InvalidValueError: An unknown name, or a bad value.
            TokenizerError, TemplateError, UnknownBackendError, UnknownParserError, DetectionError, BackendError: Each a
                sentence.
            LawViolationError: The tokenizer is not the one that the server uses (law 15).
        """
        check_arguments("Policy.connect", options, [*PolicyOptions.__annotations__, *CONNECTED_TO], backend)
        parts = await connect(backend=backend, base_url=base_url, tokenizer=tokenizer, **options)
        return cls(**{part.name: getattr(parts, part.name) for part in fields(parts)})

    def model(self, *, ledger: Ledger | None = None, **options: Unpack[RolloutOptions]) -> TITOModel:
        """Make the Strands model of one rollout.

        Args:
            ledger: See `TITOModel`.
            **options: See `RolloutOptions`.
        """
        return TITOModel.of(self, ledger, **options)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A Policy cannot be copied or pickled: it holds connections to the server. Send the arguments of "
            "Policy.connect, and connect in the other process; ledgers and trajectories can be sent."
        )


class TITOModel(Model):
    """A Strands model over one policy, with a ledger of every token.

    Args:
        backend: "vllm", "sglang", another installed backend's name, or a backend object.
        base_url: Address of the server, such as "http://localhost:8000" or "unix:///run/vllm.sock", or a list of the
            addresses of equal servers, over which rollouts are spread.
        tokenizer: Name or folder of the model's tokenizer, or the object.
        model_id: Name of the model on the server; its first one when None.
        ledger: The ledger to write to. When None it is a new one, or with a store the one that the first agent's
            restored session names.
        **options: `RolloutOptions` says what each rollout may choose, such as `sampling` and `history`,
            `PolicyOptions` what is fixed with the policy, such as `parser` and `store`, and `BackendOptions` what the
            backend takes, such as `api_key` and `timeout_s`.

    Raises:
        InvalidValueError: An unknown name, or a bad value; the sentence names the nearest name.
        Exception: What `Policy.connect` raises.
    """

    # Strands then keeps the tool list as it is and lets us constrain the answer by the model's JSON schema.
    _supports_structured_output = True

    def __init__(
        self,
        *,
        backend: str | Backend,
        base_url: str | Sequence[str] = "",
        tokenizer: str | PreTrainedTokenizerBase,
        model_id: str | None = None,
        ledger: Ledger | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        known = [*ModelOptions.__annotations__, *CONNECTED_TO, "model_id", "ledger"]
        check_arguments("TITOModel", options, known, backend)
        given: dict[str, Any] = dict(options)
        of_rollout: Any = {name: given.pop(name) for name in RolloutOptions.__annotations__ if name in given}
        settings = Settings.of(**of_rollout)  # before the server is asked: bad input gets its error first
        if model_id is not None:
            given["model"] = model_id
        policy = Policy.connect(backend=backend, base_url=base_url, tokenizer=tokenizer, **given)
        self._begin(policy, ledger, settings)

    @classmethod
    def of(cls, policy: Policy, ledger: Ledger | None = None, **options: Unpack[RolloutOptions]) -> TITOModel:
        """Make the model of one rollout from a shared policy."""
        return cls.with_settings(policy, ledger, Settings.of(**options))

    @classmethod
    def with_settings(cls, policy: Policy, ledger: Ledger | None, settings: Settings) -> TITOModel:
        """Make the model of one rollout from a shared policy and options that were checked before."""
        model = cls.__new__(cls)
        model._begin(policy, ledger, settings)
        return model

    def _begin(self, policy: Policy, ledger: Ledger | None, settings: Settings) -> None:
        if not isinstance(policy, Policy):
            kind = type(policy).__name__
            raise InvalidValueError(f"policy must be what Policy.connect returns, not of type {kind}.")
        if ledger is not None and not isinstance(ledger, Ledger):
            kind = type(ledger).__name__
            raise InvalidValueError(f"ledger must be a Ledger, or None for a new one, not of type {kind}.")
        self.policy = policy
        self._settings = settings.at(policy.info)
        self._recording = Recording(policy, ledger)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A model cannot be copied or pickled: it holds connections to the server. Send model.ledger or "
            "model.trajectories, or the arguments that the model was made with, and make one in the other process."
        )

    @property
    def config(self) -> TITOConfig:
        """The configuration, as Strands' tracer reads it."""
        return self._settings.config(self.policy.info, self.policy.detected.name)

    def get_config(self) -> TITOConfig:
        """Return the configuration."""
        return self.config

    def update_config(self, **model_config: Any) -> None:
        """Change sampling parameters by name, all of them by `sampling`, or `context_window_limit`.

        Raises:
            ValueError: An unknown name or a bad value; nothing is changed.
        """
        self._settings = self._settings.changed(self.policy.info, model_config)

    @property
    def certificate(self) -> Certificate:
        """What was tried on the chat template, and found (law 7)."""
        return self.policy.template.certificate

    @property
    def ledger(self) -> Ledger:
        """The record of this rollout, which every turn is committed to."""
        return self._recording.ledger

    @property
    def trajectories(self) -> list[Trajectory]:
        """Every root-to-leaf path of the ledger; each sampled token is trained in exactly one."""
        return self.ledger.trajectories()

    @property
    def trajectory(self) -> Trajectory:
        """The ledger's only trajectory.

        Raises:
            SeveralTrajectoriesError: There is none yet, or several; the message lists them.
        """
        found = self.trajectories
        if len(found) == 1:
            return found[0]
        if not found:
            raise SeveralTrajectoriesError("The ledger holds no turn yet: run the agent first.")
        raise SeveralTrajectoriesError(
            f"The ledger holds {len(found)} trajectories, since a history was edited, retried or shared. "
            f"Use model.trajectories.\n{self.ledger.tree()}"
        )

    @property
    def parse_report(self) -> ParseReport:
        """How well the policy's calls were formed over the rollout, by tool."""
        return ParseReport.of(self.ledger)

    def reset(self) -> Ledger:
        """Return the ledger and start the next one.

        Reset between runs: a turn that is in flight still belongs to the ledger it began in, and lands there.
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
        **_: Any,
    ) -> AsyncGenerator[StreamEvent]:
        """Run one turn: prepare, generate, yield its events, and commit it once they have all been taken.

        Raises:
            InvalidMessageError: The messages, tools or system prompt do not have Strands' form.
            UnsupportedContentError: A message holds what cannot become tokens, such as an image.
            ContextLengthError: The history does not fit; it is Strands' `ContextWindowOverflowException`, too.
            TotalTokensReachedError: Nothing is left of `max_total_tokens`; nothing was sent.
            ThrottledError: The engine stayed overloaded through every retry. Strands does not try again.
            TurnNotStoredError: The store could not take the turn.
            MalformedCallError: With `malformed_calls="raise"`; the turn is committed, and yields no more events.
            UnsupportedToolChoiceError: A tool call is forced that the parser has no grammar for.
            BackendError: Anything else of the engine's; the ledger is then as before the turn.
        """
        asked = TurnInput.of(
            messages,
            system_text(system_prompt, system_prompt_content),
            tool_specs,
            tool_choice,
            structured_output_model,
            model_state,
            cancel_signal,
        )
        return run_turn(self.policy, self._recording, self._settings, asked)

    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
    ) -> int:
        """Count the tokens of a history with the policy's own template and tokenizer.

        Messages alone, without a system prompt and tools (not even an empty list of them), are counted as what they add
        to a longer history: so does Strands ask before every turn but the first, of what is new.
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
            The stream's events, and last {"output": the validated object}.
        """
        check_output_model(output_model)
        texts: list[str] = []
        async for event in self.stream(prompt, None, system_prompt, structured_output_model=output_model, **kwargs):
            texts.append(cast(dict[str, Any], event).get("contentBlockDelta", {}).get("delta", {}).get("text", ""))
            yield cast(dict[str, Any], event)
        try:
            output = output_model.model_validate_json("".join(texts))
        except ValidationError as error:  # cut off by the token limit, or a constraint that no grammar can hold to
            raise StructuredOutputException(
                f"The answer is not a valid {output_model.__name__} ({error.errors()[0]['msg']}): raise "
                f"max_new_tokens, or loosen the schema. It said {''.join(texts)[:200]!r}."
            ) from error
        yield {"output": output}
