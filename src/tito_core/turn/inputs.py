"""What a turn takes: the parts of the policy that all rollouts share, and what Strands asks."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from strands.types.content import Messages, SystemContentBlock
from strands.types.tools import ToolChoice, ToolSpec

from tito_core.backend.protocol import Backend, EngineInfo
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.typed_values import InvalidValueError
from tito_core.chat.certificate import Certificate
from tito_core.chat.message_check import check_opening, check_system_blocks
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.chat.template import ChatTemplate
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.vocabulary import VocabularyCheck
from tito_core.parsing.detection import Detected
from tito_core.parsing.registry import ToolParser
from tito_core.store import LedgerFile
from tito_core.turn.constraints import OutputConstraint
from tito_core.turn.prompt_cache import PromptCache
from tito_core.turn.sampling_cache import SamplingCache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """The heavy, shared parts of a policy; a `Policy` is one.

    Attributes:
        backend: The connected backend.
        info: What the server said of itself, and what was measured.
        tokenizer: The policy's tokenizer.
        template: Its certified chat template.
        parser: Reads reasoning and calls out of completions.
        detected: Which format that is, and why: what the chat template shows, or what the user named.
        stop_token_ids: Ends of a turn: the template's and the tokenizer's end of sequence.
        store: The file that every rollout's turns are appended to as they are committed, or None.
        prompts: The text of what is sent, by ledger and turn.
        recorded: What is recorded of sampling parameters, worked out once.
        vocabulary: How the tokenizer was compared with the server's (law 15).
    """

    backend: Backend
    info: EngineInfo
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    parser: ToolParser
    detected: Detected
    stop_token_ids: tuple[int, ...]
    store: LedgerFile | None = None
    prompts: PromptCache = field(default_factory=PromptCache)
    recorded: SamplingCache = field(default_factory=SamplingCache)
    vocabulary: VocabularyCheck = VocabularyCheck.NOT_CHECKED

    def ledger(
        self, *, group_id: str | None = None, task_id: str | None = None, user: Mapping[str, Any] | None = None
    ) -> Ledger:
        """Make a new ledger that names this policy's tokenizer and certified template, and streams to the store."""
        ledger = Ledger(
            group_id=group_id,
            task_id=task_id,
            tokenizer=self.tokenizer.name_or_path or None,
            user=user,
            certificate=summary(self.template.certificate),
            vocabulary=self.vocabulary,
        )
        return ledger if self.store is None else self.store.attach(ledger)

    def sampling(self, given: SamplingParams) -> SamplingParams:
        """Add the policy's own stops to a user's sampling parameters, unless these ignore the end of a turn."""
        return self.recorded.stopped(given, self.stop_token_ids)


@lru_cache(maxsize=16)
def summary(certificate: Certificate) -> Mapping[str, Any]:
    """Return a certificate as every ledger's header keeps it: the probes that passed are counted, not named."""
    fields: dict[str, Any] = json.loads(certificate.to_json())
    return {**fields, "passed": len(certificate.passed)}


@dataclass(frozen=True, slots=True, eq=False)
class TurnInput:
    """What Strands asks of one turn. Build it with `TurnInput.of`, which checks it.

    Attributes:
        messages: The agent's whole history.
        system_prompt: The system prompt as text, or None.
        tool_specs: The agent's tools.
        constraint: A tool call that is forced, or the schema of the answer.
        model_state: The agent's own channel, in which we keep its last turn; None for a call outside any agent.
        cancel_signal: Is set when the agent is cancelled, or None.
    """

    messages: Messages
    system_prompt: str | None = None
    tool_specs: list[ToolSpec] | None = None
    constraint: OutputConstraint = OutputConstraint()  # noqa: RUF009  # frozen
    model_state: dict[str, Any] | None = None
    cancel_signal: threading.Event | None = None

    @classmethod
    def of(
        cls,
        messages: Messages,
        system_prompt: str | None,
        tool_specs: list[ToolSpec] | None,
        tool_choice: ToolChoice | None,
        output_model: type[BaseModel] | None,
        model_state: dict[str, Any] | None,
        cancel_signal: threading.Event | None,
    ) -> TurnInput:
        """Check what can be checked before a parent is found.

        Raises:
            InvalidMessageError: The messages, tools or system prompt do not have Strands' form.
            UnsupportedToolChoiceError, InvalidValueError: Something else does not.
        """
        check_opening(messages, system_prompt, tool_specs)
        if model_state is not None and not isinstance(model_state, dict):
            raise InvalidValueError(f"model_state must be a dict, or None, not of type {type(model_state).__name__}.")
        if cancel_signal is not None and not hasattr(cancel_signal, "is_set"):
            raise InvalidValueError(
                f"cancel_signal must be a threading.Event, or None, not of type {type(cancel_signal).__name__}."
            )
        refuse_reserved_name(tool_specs)
        constraint = OutputConstraint(tool_choice, output_model)
        return cls(messages, system_prompt, tool_specs, constraint, model_state, cancel_signal)


def system_text(system_prompt: str | None, content: list[SystemContentBlock] | None) -> str | None:
    """Return the system prompt as text; its blocks are joined by newlines, as Strands joins them.

    Raises:
        InvalidMessageError: The blocks do not have Strands' form.
    """
    if system_prompt is not None or content is None:
        return system_prompt
    check_system_blocks(content)
    return "\n".join(block["text"] for block in content if "text" in block) or None


def refuse_reserved_name(tool_specs: list[ToolSpec] | None) -> None:
    """Refuse a tool under the name by which malformed calls are reported, which must stay unknown to Strands."""
    for spec in tool_specs or ():
        if spec["name"] == MALFORMED_CALL:
            raise ValueError(
                f"A tool is named {MALFORMED_CALL!r}, the name under which malformed calls are reported: rename it."
            )
