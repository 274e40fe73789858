"""`TITOModel`: the Strands model provider in which the tokens a policy samples are the tokens it is trained on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, Unpack, cast

from pydantic import BaseModel, ValidationError
from strands.models.model import Model
from strands.types.content import Messages, SystemContentBlock
from strands.types.exceptions import StructuredOutputException
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolChoice, ToolSpec

from tito_core import settings
from tito_core.argument_checks import check_channels, check_parts
from tito_core.asked import Asked, check_output_model
from tito_core.backend.aborts import MAX_RESUMES, OnAbort
from tito_core.backend.protocol import Backend
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.wanted import Wanted
from tito_core.chat.certificate import Certificate, ContentTokens
from tito_core.chat.message_check import check_messages, check_opening
from tito_core.chat.renderers import MakeRenderer
from tito_core.chat.words import LONG_TEXT
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory
from tito_core.malformed import MalformedCalls
from tito_core.parse_report import ParseReport
from tito_core.policy import Policy
from tito_core.recording import Recording
from tito_core.store import LedgerFile
from tito_core.streamed_turn import one_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

M = TypeVar("M", bound=BaseModel)


class TITOModel(Model):
    """A Strands model over one policy, with a ledger of every token.

    Args:
        backend: "vllm", "sglang", another installed backend's name, or a backend object.
        base_url: Address of the server, such as "http://localhost:8000" or "unix:///run/vllm.sock", or a list of the
            addresses of equal servers, over which rollouts are spread.
        tokenizer: Name or folder of the model's tokenizer, or the object.
        model_id: Name of the model on the server; its first one when None.
        sampling: Sampling parameters of all turns.
        parser: Name of the tool-call format; "auto" takes the one that the chat template shows.
        template_arguments: Fixed for the rollout, such as {"enable_thinking": False}.
        content_tokens: "inert": no control token comes from message content, whatever it spells (law 6).
            "as-template" lets content spell them, as the tokenizer itself would; the certificate says so.
        renderer: Takes the deltas from the package `renderers` (extra `renderers`): the name of one, such as "qwen3",
            or a function that makes one for a tokenizer. What differs from the chat template is refused.
        ledger: The ledger to write to. When None it is a new one, or with a store the one that the first agent's
            restored session names.
        context_window_limit: Tokens of context to use; the server's own length when None.
        history: What to do when an agent's own history changed: "fork" makes a branch that is linked to where it left,
            "error" raises `HistoryChangedError` before anything is sent.
        malformed_calls: What becomes of a call that is not sound; it never runs. "feedback" lets the policy read why,
            "end_turn" ends the turn with its text, "raise" raises `MalformedCallError`. The turn is kept in each case.
        thinking: What becomes of sampled reasoning where the chat template would strip it: "keep" leaves it where it
            was sampled, "as-template" begins a branch from the template's own rendering, linked to where it left.
        on_abort: What becomes of an answer that the server was told to abort, as trainers do before they change
            weights: "resume" goes on with the same turn from its tokens, "discard" raises `GenerationAbortedError`,
            "commit" keeps the part that is there as a turn that was cut off.
        max_resumes: How often one answer is resumed at most.
        turn_timeout_s: Longest wait for a turn's answer in seconds, with pauses, retries and resumed parts; None leaves
            each request to the backend's `timeout_s`.
        stream: Whether Strands gets reasoning and text while they are sampled; the ledger is the same. Calls come once
            the answer is whole, since until then a limit may make text of them.
        max_total_tokens: Most tokens of a trajectory, prompts and answers together. An answer that would go past it
            is cut there and ends with `max_tokens`; when none is left, `TotalTokensReachedError` comes before sending.
        verify_echo: How often the server is asked to echo the prompt's ids, which are compared with those that were
            sent: on "always" every turn, or on the "first" of each path only, which saves a long context's bytes.
            The number of prompt tokens that the server counted is compared on every turn (law 4).
        store: A file, or its path, that takes every turn as it is committed.
        wanted: What to ask of the engine beside sampled tokens and their logprobs, such as {"top_logprobs": 5}; see
            `Wanted`. It comes as optional columns of the trajectory.
        **options: For the backend: `api_key`, `timeout_s`, `connect_timeout_s`,
            `max_connections`, `max_attempts`.
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
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        parser: str = "auto",
        template_arguments: Mapping[str, Any] | None = None,
        content_tokens: ContentTokens = "inert",
        renderer: str | MakeRenderer | None = None,
        ledger: Ledger | None = None,
        context_window_limit: int | None = None,
        history: Literal["fork", "error"] = "fork",
        malformed_calls: MalformedCalls = "feedback",
        thinking: Literal["keep", "as-template"] = "keep",
        on_abort: OnAbort = "resume",
        max_resumes: int = MAX_RESUMES,
        turn_timeout_s: float | None = None,
        max_total_tokens: int | None = None,
        stream: bool = False,
        verify_echo: Literal["always", "first"] = "always",
        store: LedgerFile | str | PathLike[str] | None = None,
        wanted: Wanted | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        chosen = settings.Settings.of(  # before the server is asked: bad input gets its error first
            sampling=sampling,
            context_window_limit=context_window_limit,
            history=history,
            malformed_calls=malformed_calls,
            thinking=thinking,
            on_abort=on_abort,
            max_resumes=max_resumes,
            turn_timeout_s=turn_timeout_s,
            max_total_tokens=max_total_tokens,
            stream=stream,
            wanted=wanted,
            verify_echo=verify_echo,
        )
        if model_id is not None:
            options["model"] = model_id
        policy = Policy.connect(
            backend=backend,
            base_url=base_url,
            tokenizer=tokenizer,
            parser=parser,
            template_arguments=template_arguments,
            content_tokens=content_tokens,
            renderer=renderer,
            store=store,
            **options,
        )
        self._begin(policy, ledger, chosen)

    @classmethod
    def of(cls, policy: Policy, ledger: Ledger | None = None, **choices: Unpack[settings.Choices]) -> TITOModel:
        """Make the model of one rollout from a shared policy; `choices` are those arguments of `TITOModel`."""
        settings.check_choices(choices)
        model = cls.__new__(cls)
        model._begin(policy, ledger, settings.Settings.of(**choices))
        return model

    def _begin(self, policy: Policy, ledger: Ledger | None, chosen: settings.Settings) -> None:
        check_parts(policy, ledger, Policy)
        self.policy = policy
        self._settings = chosen.at(policy.info)
        self._recording = Recording(policy, ledger)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A model cannot be copied or pickled: it holds connections to the server. Send model.ledger or "
            "model.trajectories, or the arguments that the model was made with, and make one in the other process."
        )

    @property
    def config(self) -> settings.TITOConfig:
        """The configuration, as Strands' tracer reads it."""
        return self._settings.config(self.policy.info, self.policy.detected.name)

    def get_config(self) -> settings.TITOConfig:
        """Give the configuration."""
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
            settings.SeveralTrajectoriesError: There is none yet, or several; the message lists them.
        """
        found = self.trajectories
        if len(found) == 1:
            return found[0]
        if not found:
            raise settings.SeveralTrajectoriesError("The ledger holds no turn yet: run the agent first.")
        raise settings.SeveralTrajectoriesError(
            f"The ledger holds {len(found)} trajectories, since a history was edited, retried or shared. "
            f"Use model.trajectories.\n{self.ledger.tree()}"
        )

    @property
    def parse_report(self) -> ParseReport:
        """How well the policy's calls were formed over the rollout, by tool."""
        return ParseReport.of(self.ledger)

    def reset(self) -> Ledger:
        """Give the ledger and start the next one.

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
        system = settings.system_text(system_prompt, system_prompt_content)
        check_opening(messages, system, tool_specs)
        check_channels(model_state, cancel_signal)
        settings.refuse_reserved_name(tool_specs)
        return one_turn(
            self.policy,
            self._recording,
            self._settings,
            messages,
            system,
            tool_specs,
            Asked(tool_choice, structured_output_model),
            model_state,
            cancel_signal,
        )

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
        system, template = settings.system_text(system_prompt, system_prompt_content), self.policy.template
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
                f"The answer is no {output_model.__name__} ({error.errors()[0]['msg']}): raise max_new_tokens, or "
                f"loosen the schema. It said {''.join(texts)[:200]!r}."
            ) from error
        yield {"output": output}
