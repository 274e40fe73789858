"""Tool parsers by name: ours, and those that other distributions install as entry points `tito.tool_parsers`.

"auto" detects the format of a chat template by text that only one family writes, in its source or else in a call that
it renders. It never guesses.

To add a tool-call format to this package, write a `CallFormat` and call `register_format`; the docstring of
`CallFormat` lists the steps. To add a parser that also reads reasoning in its own way, write a `ToolParser` and call
`register_tool_parser`, as `formats/gpt_oss.py` does.

In another distribution, either call these functions before the parser is chosen by name, or install a factory, which
takes a tokenizer and returns a `ToolParser`. For a `CallFormat` the factory is
`lambda tokenizer: TurnParser(tokenizer, MyCalls())`, with `tito_core.parsing.turn.TurnParser`:

    [project.entry-points."tito.tool_parsers"]
    my_format = "my_package.my_module:my_factory"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, get_args

from tito_core.entry_points import load, offered
from tito_core.ledger.errors import TITOError
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import ParsedTurn, Tools
from tito_core.parsing.grammar import CallGrammar
from tito_core.parsing.markup import Markup
from tito_core.parsing.turn import REASONING, THINK, ReasoningTags, TurnParser, shown_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENTRY_POINT_GROUP = "tito.tool_parsers"
AUTO = "auto"
ToolCalls = Literal["strict", "lenient"]
"""Which calls run: only those as the family documents them ("strict"), or all that have one reading ("lenient")."""


class ParserSession(Protocol):
    """Parses one completion. The result must not depend on how the ids are split over calls of `feed`."""

    def feed(self, ids: Sequence[int]) -> None:
        """Take the next sampled ids."""

    def finish(self, *, truncated: bool) -> ParsedTurn:
        """Return the parsed completion. `truncated`: the engine stopped for length."""


class ToolParser(Protocol):
    """Parser of a format of reasoning and tool calls, bound to a tokenizer. Stateless; shared by all rollouts."""

    def start(self, prompt_tail: Sequence[int] = (), tools: Tools | None = None) -> ParserSession:
        """Start parsing a completion.

        Args:
            prompt_tail: The last ids of the prompt; the chat template may have opened a reasoning block in them.
            tools: The JSON Schema of each tool's arguments, by tool name. A call that does not fit is malformed. Where
                arguments are written as plain text (Qwen3-Coder, GLM, MiniMax), the types come from it; all arguments
                of a tool that is not among them are strings.

        Raises:
            ToolSchemaError: A schema is not JSON, or nests too deep.
        """

    def call_grammar(self, tools: Tools, name: str | None = None, prompt_tail: Sequence[int] = ()) -> CallGrammar:
        """Return the grammar that makes the next completion a call of the tool `name`, or of any tool.

        Args:
            tools: As for `start`.
            name: The tool; None for any.
            prompt_tail: As for `start`; if it leaves reasoning open, the call comes after the reasoning.

        Raises:
            NoCallGrammarError: The format has no grammar, or the tool is unknown.
        """


ParserFactory = Callable[["PreTrainedTokenizerBase"], ToolParser]
F = TypeVar("F", bound=ParserFactory)


class UnknownParserError(TITOError, ValueError):
    """Unknown tool parser or reasoning format, or an option that the parser does not support."""


class DetectionError(TITOError, ValueError):
    """A chat template matches no known tool-call format, or more than one."""


@dataclass(frozen=True, slots=True)
class Detected:
    """The format that was chosen.

    Attributes:
        name: The parser's name.
        why: The reason, as a sentence.
    """

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Marks:
    """A template matches a format if it contains all of `has` and none of `lacks`."""

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def match(self, template: str) -> bool:
        """Return whether a template matches."""
        return all(mark in template for mark in self.has) and not any(mark in template for mark in self.lacks)


_FACTORIES: dict[str, ParserFactory] = {}
_ALIASES: dict[str, str] = {}
"""Other names of our parsers, such as those of the engines' `--tool-call-parser`."""
_TABLE: dict[str, Marks] = {}
"""The marks of each format, by parser name."""


def register_tool_parser(name: str, *aliases: str, marks: Marks | None = None) -> Callable[[F], F]:
    """Register a parser class, or a function from tokenizer to parser, under a name. Use it as a decorator.

    Args:
        name: The parser's name.
        aliases: Other names for it.
        marks: How parser="auto" recognises the format in a chat template; without marks it never chooses this parser.
    """

    def register(factory: F) -> F:
        _FACTORIES[name] = factory
        _ALIASES.update(dict.fromkeys(aliases, name))
        if marks is not None:
            _TABLE[name] = marks
        return factory

    return register


def register_format(
    name: str,
    calls: CallFormat,
    *aliases: str,
    reasoning: ReasoningTags | None = THINK,
    marks: Marks | None = None,
) -> None:
    """Register a tool-call format under a name.

    Args:
        name: The parser's name.
        calls: The format; see `CallFormat` for how to write one.
        aliases: Other names for it.
        reasoning: The family's reasoning tags; None if it writes no reasoning.
        marks: How parser="auto" recognises the format in a chat template; without marks it never chooses this parser.
    """
    register_tool_parser(name, *aliases, marks=marks)(lambda tokenizer: TurnParser(tokenizer, calls, reasoning))


def get_tool_parser(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    reasoning: str | None = None,
    tool_calls: ToolCalls = "strict",
) -> ToolParser:
    """Build a parser for a tokenizer.

    Args:
        name: The parser's name; "auto" detects it in the chat template.
        tokenizer: A tag that is one of its added tokens is matched by id.
        reasoning: The name of other reasoning tags than the family's own (see `REASONING`).
        tool_calls: See `ToolCalls`. A loose call has the status LENIENT with "lenient", and MALFORMED with "strict". A
            parser of another distribution supports "lenient" with a method `leniently()` that returns such a parser.

    Raises:
        UnknownParserError: The parser or the reasoning is unknown, or the parser does not support an option; the
            message lists the known names.
        DetectionError: With "auto", the chat template matches no format, or several.
    """
    if tool_calls not in get_args(ToolCalls):
        raise UnknownParserError(f"tool_calls must be 'strict' or 'lenient', not {tool_calls!r}.")
    parser = _with_reasoning(name, tokenizer, reasoning)
    if tool_calls == "strict":
        return parser
    leniently: Callable[[], ToolParser] | None = getattr(parser, "leniently", None)
    if leniently is None:
        raise UnknownParserError(f"The tool parser {name!r} has no lenient mode. Remove tool_calls='lenient'.")
    return leniently()


def _with_reasoning(name: str, tokenizer: PreTrainedTokenizerBase, reasoning: str | None) -> ToolParser:
    parser = _built(name, tokenizer)
    if reasoning is None:
        return parser
    if not isinstance(parser, TurnParser):
        raise UnknownParserError(f"The tool parser {name!r} parses reasoning itself. Remove reasoning={reasoning!r}.")
    if reasoning not in REASONING:
        raise UnknownParserError(f"Unknown reasoning format {reasoning!r}. Available: {', '.join(sorted(REASONING))}.")
    return TurnParser(tokenizer, parser.calls, REASONING[reasoning])


def _built(name: str, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
    name = choose_tool_parser(name, tokenizer).name
    name = _ALIASES.get(name, name)
    if name in _FACTORIES:
        return _FACTORIES[name](tokenizer)
    factory: ParserFactory | None = load(ENTRY_POINT_GROUP, name)
    if factory is None:
        known = ", ".join([AUTO, *sorted({*_FACTORIES, *offered(ENTRY_POINT_GROUP)})])
        near = "".join(f" Did you mean {each!r}?" for each in get_close_matches(name.lower(), known_tool_parsers(), 1))
        raise UnknownParserError(f"Unknown tool parser {name!r}.{near} Available: {known}.")
    parser = factory(tokenizer)
    if not callable(getattr(parser, "start", None)) or isinstance(parser, type):
        kind = type(parser).__name__
        raise UnknownParserError(
            f"{name!r} of an installed package makes a {kind}, which has no start(): see ToolParser."
        )
    return parser


def known_tool_parsers() -> list[str]:
    """Return the names of all parsers, including aliases and installed ones."""
    return sorted({*_FACTORIES, *_ALIASES, *offered(ENTRY_POINT_GROUP)})


def control_strings(parser: ToolParser) -> frozenset[str]:
    """Return the texts of the tokens that a parser reads as markup; no message content may write them (law 6).

    A parser of another distribution can list them in an attribute `control_strings`.
    """
    markup = getattr(parser, "markup", None)
    return markup.strings if isinstance(markup, Markup) else frozenset(getattr(parser, "control_strings", ()))


def choose_tool_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Detected:
    """Return the parser's name and the reason for the choice; "auto" detects it in the chat template.

    Raises:
        DetectionError: With "auto", the chat template matches no format, or several.
    """
    if name != AUTO:
        return Detected(name, "It was named by the user.")
    source = template_text(tokenizer)
    try:
        return detect_tool_parser(source)
    except DetectionError:  # what it writes may not stand in its source, as in `{'name': ...} | tojson`
        shown = re.sub(r"\{\s+", "{", re.sub(r'":\s*', '": ', shown_call(tokenizer)))
        return detect_tool_parser(source + shown)


def detect_tool_parser(template: str) -> Detected:
    """Detect the tool-call format of a chat template.

    Args:
        template: The template's source.

    Raises:
        DetectionError: It matches no known format, or several.
    """
    names = sorted(name for name, marks in _TABLE.items() if marks.match(template))
    if not names:
        known = ", ".join(sorted(_TABLE))
        raise DetectionError(
            f"The chat template matches no tool-call format that can be detected ({known}). Name the parser, as in "
            "parser='hermes'; a policy that calls no tools can use any."
        )
    if len(names) > 1:
        raise DetectionError(
            f"The chat template matches several tool-call formats: {' and '.join(map(repr, names))}. Name the parser, "
            f"as in parser={names[0]!r}."
        )
    [only] = names
    has = " and ".join(map(repr, _TABLE[only].has))
    return Detected(only, f"The chat template has {has}, which only {only} writes.")


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the source of the chat template; of several templates, "tool_use" or else "default".

    Raises:
        DetectionError: The tokenizer has no such template.
    """
    template: object = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    if not isinstance(template, str):
        raise DetectionError(
            "The tokenizer has no chat template that a policy can use, and it needs one. Load the tokenizer of the "
            "model's instruct version, or set tokenizer.chat_template to the text of a template."
        )
    return template
