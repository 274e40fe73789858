"""The checked input of one turn: the history, and a forced tool call or a structured-output schema."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from pydantic import BaseModel
from strands.types.content import Messages, SystemContentBlock
from strands.types.tools import ToolChoice, ToolChoiceToolDict, ToolSpec

from tito_core.backend.sampling import Grammar, SamplingParams
from tito_core.backend.values import InvalidValueError
from tito_core.chat.message_check import check_opening, check_system_blocks, describe
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.ledger.errors import TITOError
from tito_core.parsing.completion import Tools
from tito_core.parsing.grammar import CallGrammar, NoCallGrammarError, TagFormat, arguments_json
from tito_core.parsing.turn import TurnParser

if TYPE_CHECKING:
    from tito_core.parsing.registry import ToolParser


_LONGEST_REFUSAL = 500
"""Maximum characters of the reason why a call cannot be forced; it may list all tools."""


class UnsupportedToolChoiceError(TITOError, ValueError):
    """A tool call cannot be forced: the parser's format has no grammar, or the tool is unknown."""


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """A forced tool call or a structured-output schema.

    Attributes:
        tool_choice: {"auto": {}}, {"any": {}} or {"tool": {"name": ...}}; None means "auto".
        output_model: The answer's schema, or None. Strands passes it together with the choice of a tool with the same
            schema. Then the tool call is forced; where the format has no grammar for calls, the answer's text is.
    """

    tool_choice: ToolChoice | None = None
    output_model: type[BaseModel] | None = None

    def __post_init__(self) -> None:
        """Check both values.

        Raises:
            UnsupportedToolChoiceError: `tool_choice` does not have Strands' form.
            InvalidValueError: `output_model` is not a pydantic model.
        """
        if self.tool_choice is not None:
            _check_choice(self.tool_choice)
        if self.output_model is not None:
            check_output_model(self.output_model)

    @property
    def forces_call(self) -> bool:
        """Whether a tool has to be called."""
        return self.tool_choice is not None and "auto" not in self.tool_choice

    def forced_tools(self, tools: Tools) -> tuple[str, ...] | None:
        """Return the names of the tools of which one has to be called; None if no call is forced."""
        if not self.forces_call:
            return None
        choice: Any = self.tool_choice
        return (choice["tool"]["name"],) if "tool" in choice else tuple(tools)

    def tools(self, tools: Tools) -> Tools:
        """Return the tools, with the answer's own schema for the tool of a structured output.

        Strands' tool leaves references to definitions that it dropped.
        """
        tool = None if self.tool_choice is None else cast(Mapping[str, Any], self.tool_choice).get("tool")
        if self.output_model is None or tool is None or tool["name"] != self.output_model.__name__:
            return tools
        return {**tools, tool["name"]: self.output_model.model_json_schema()} if tool["name"] in tools else tools

    def sampling(
        self, base: SamplingParams, parser: ToolParser, tools: Tools, prompt_tail: Sequence[int]
    ) -> SamplingParams:
        """Return the sampling parameters of the turn, with the grammar of the constraint.

        Args:
            base: The rollout's parameters.
            parser: Builds the grammar of a call.
            tools: The JSON Schema of each tool's arguments, by name.
            prompt_tail: The last prompt ids, which may open reasoning.

        Raises:
            UnsupportedToolChoiceError: The call cannot be forced.
        """
        if self.tool_choice is None and self.output_model is None and base.grammar is None:
            return base
        grammar = self._grammar(parser, tools, prompt_tail) or _after_reasoning(base.grammar, parser, prompt_tail)
        if grammar is None:
            return base
        # Engines do not apply a minimum length with a grammar, and a complete answer must be able to end.
        return base.model_copy(update={"grammar": grammar, "min_new_tokens": 0, "ignore_eos": False})

    def _grammar(self, parser: ToolParser, tools: Tools, prompt_tail: Sequence[int]) -> Grammar | None:
        choice = self.tool_choice
        if not self.forces_call:
            return self._answer_grammar(parser, prompt_tail)
        try:
            tool: Mapping[str, Any] | None = cast(Mapping[str, Any], choice).get("tool")
            name = None if tool is None else tool["name"]
            forced = parser.call_grammar(tools, name, prompt_tail)
        except NoCallGrammarError as error:
            if (answer := self._answer_grammar(parser, prompt_tail)) is not None:
                return answer
            reason = shorten(str(error), _LONGEST_REFUSAL, placeholder=" ...")
            raise UnsupportedToolChoiceError(f"tool_choice: {reason}") from error
        return _grammar_of(forced)

    def _answer_grammar(self, parser: ToolParser, prompt_tail: Sequence[int]) -> Grammar | None:
        if self.output_model is None:
            return None
        schema = self.output_model.model_json_schema()
        thinking = parser.answer_grammar(schema, prompt_tail) if isinstance(parser, TurnParser) else None
        return Grammar(kind="json_schema", value=json.dumps(schema)) if thinking is None else _grammar_of(thinking)


_STRANDS_NAMES = ("Strands Agents", "default")
"""The `name` and the `agent_id` that Strands gives to an agent without them."""


class Caller(NamedTuple):
    """The Strands agent that makes a call.

    Attributes:
        name: The `name` or else the `agent_id` that the user gave it; None if there is neither, or if it is unknown.
        signal: The agent's own cancel signal, one object for the agent's life; None for a call outside any agent.
    """

    name: str | None = None
    signal: threading.Event | None = None

    @classmethod
    def of(cls, invocation_state: Any, cancel_signal: threading.Event | None) -> Caller:
        """Identify the caller.

        Strands passes the agent's own signal, and puts the agent into the invocation state. Parallel agents of a graph
        share that state, so the agent in it may be another one: only the agent with this signal names the caller.
        """
        agent = invocation_state.get("agent") if isinstance(invocation_state, Mapping) else None
        if agent is None or not isinstance(cancel_signal, threading.Event):
            return cls()
        if getattr(agent, "cancel_signal", None) is not cancel_signal:
            return cls(None, cancel_signal)
        given = (getattr(agent, "name", None), getattr(agent, "agent_id", None))
        names = (value for value, default in zip(given, _STRANDS_NAMES, strict=True) if value != default)
        name = next((value for value in names if isinstance(value, str) and value), None)
        return cls(None if name is None else name.encode(errors="replace").decode(), cancel_signal)


NO_CALLER = Caller()


class TurnInput(msgspec.Struct, frozen=True, eq=False):
    """The input of one turn. Build it with `TurnInput.of`, which checks it.

    Attributes:
        messages: The agent's whole history, and what was injected into its last message for this call.
        system_prompt: The system prompt as text, or None.
        tool_specs: The agent's tools.
        constraint: A forced tool call, or the schema of the answer.
        model_state: The agent's own state, in which we keep its last turn; None for a call outside any agent.
        cancel_signal: Set when the agent is cancelled; or None.
        caller: The agent that makes the call.
        injected: Number of last blocks of the last message that Strands adds for this call only, as `ContextInjector`
            does. They are in the prompt, and not in the agent's history.
    """

    messages: Messages
    system_prompt: str | None = None
    tool_specs: list[ToolSpec] | None = None
    constraint: OutputConstraint = OutputConstraint()
    model_state: dict[str, Any] | None = None
    cancel_signal: threading.Event | None = None
    caller: Caller = NO_CALLER
    injected: int = 0

    @property
    def history(self) -> Messages:
        """The agent's own history: the messages without what was injected for this call."""
        if not self.injected:
            return self.messages
        last = self.messages[-1]
        return [*self.messages[:-1], {"role": last["role"], "content": last["content"][: -self.injected]}]

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
        injected: int = 0,
        invocation_state: Any = None,
    ) -> TurnInput:
        """Check everything that can be checked before the parent is known.

        Raises:
            InvalidMessageError: The messages, tools or system prompt do not have Strands' form.
            UnsupportedToolChoiceError, InvalidValueError: Another argument does not.
        """
        check_opening(messages, system_prompt, tool_specs)
        if model_state is not None and not isinstance(model_state, dict):
            raise InvalidValueError(f"model_state must be a dict, or None, not of type {type(model_state).__name__}.")
        if cancel_signal is not None and not hasattr(cancel_signal, "is_set"):
            raise InvalidValueError(
                f"cancel_signal must be a threading.Event, or None, not of type {type(cancel_signal).__name__}."
            )
        if type(injected) is not int or injected < 0:
            raise InvalidValueError(f"dynamic_trailing_blocks must be a number of blocks, not {describe(injected)}.")
        refuse_reserved_name(tool_specs)
        constraint = OutputConstraint(tool_choice, output_model)
        caller = Caller.of(invocation_state, cancel_signal)
        return cls(messages, system_prompt, tool_specs, constraint, model_state, cancel_signal, caller, injected)

    def choosing(self, tool_specs: list[ToolSpec], name: str) -> TurnInput:
        """Return this input with other tools, of which the one with this name has to be called."""
        chosen: ToolChoiceToolDict = {"tool": {"name": name}}
        constraint = OutputConstraint(chosen, self.constraint.output_model)
        return msgspec.structs.replace(self, tool_specs=tool_specs, constraint=constraint)


def system_text(system_prompt: str | None, content: list[SystemContentBlock] | None) -> str | None:
    """Return the system prompt as text; blocks are joined by newlines, as Strands does.

    Raises:
        InvalidMessageError: The blocks do not have Strands' form.
    """
    if system_prompt is not None or content is None:
        return system_prompt
    check_system_blocks(content)
    return "\n".join(block["text"] for block in content if "text" in block) or None


def refuse_reserved_name(tool_specs: list[ToolSpec] | None) -> None:
    """Raise ValueError for a tool with the reserved name of malformed calls, which Strands must not know."""
    for spec in tool_specs or ():
        if spec["name"] == MALFORMED_CALL:
            raise ValueError(
                f"The tool name {MALFORMED_CALL!r} is reserved: it reports malformed calls. Rename the tool."
            )


def _check_choice(choice: Any) -> None:
    is_choice = isinstance(choice, Mapping) and any(key in choice for key in ("auto", "any", "tool"))
    tool = choice.get("tool", {"name": ""}) if is_choice else None
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        raise UnsupportedToolChoiceError(
            f"Invalid tool_choice {describe(choice)}. "
            "Use {'auto': {}}, {'any': {}} or {'tool': {'name': ...}}."
        )


def check_output_model(output_model: Any) -> None:
    """Check the schema of a structured output.

    Raises:
        InvalidValueError: It is not a subclass of pydantic's BaseModel.
    """
    if not (isinstance(output_model, type) and issubclass(output_model, BaseModel)):
        raise InvalidValueError(f"output_model must be a subclass of pydantic.BaseModel, not {describe(output_model)}.")


def _after_reasoning(given: Grammar | None, parser: ToolParser, prompt_tail: Sequence[int]) -> Grammar | None:
    """Return the user's grammar of an answer, after the rest of reasoning that the prompt opened; None to leave it.

    A structural tag is the whole completion as its author wrote it.
    """
    if given is None or not isinstance(parser, TurnParser):
        return None
    answer: TagFormat
    match given.kind:
        case "json_schema":
            answer = arguments_json(json.loads(given.value))
        case "regex":
            answer = {"type": "regex", "pattern": given.value}
        case "ebnf":
            answer = {"type": "grammar", "grammar": given.value}
        case _:
            return None
    thinking = parser.after_open_reasoning(answer, prompt_tail)
    return None if thinking is None else _grammar_of(thinking)


def _grammar_of(forced: CallGrammar) -> Grammar:
    return Grammar(kind="structural_tag", value=forced.value, avoided_ids=forced.avoided_ids)
