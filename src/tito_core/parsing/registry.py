"""Tool parsers by name: ours, and those that other packages install under the entry points `tito.tool_parsers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, get_args

from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import Tools
from tito_core.parsing.detection import Detected, Marks, detect_tool_parser, register_marks, template_text
from tito_core.parsing.grammar import CallGrammar
from tito_core.parsing.markup import Markup
from tito_core.parsing.parsed import ParsedTurn
from tito_core.parsing.reasoning import REASONING, THINK, ReasoningTags
from tito_core.parsing.turn import TurnParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENTRY_POINT_GROUP = "tito.tool_parsers"
AUTO = "auto"
ToolCalls = Literal["strict", "lenient"]
"""Which calls run: those that a family's documentation or template shows, or any that have exactly one reading."""


class ParserSession(Protocol):
    """Parses one completion. The result does not depend on how the ids are split over `feed` calls."""

    def feed(self, ids: Sequence[int]) -> None:
        """Take the next sampled ids."""

    def finish(self, *, truncated: bool) -> ParsedTurn:
        """Return the parsed completion. `truncated` says that the engine stopped for length."""


class ToolParser(Protocol):
    """A format of reasoning and tool calls, bound to a tokenizer. Stateless; shared by all rollouts."""

    def start(self, prompt_tail: Sequence[int] = (), tools: Tools | None = None) -> ParserSession:
        """Begin a completion.

        Args:
            prompt_tail: The last ids of the prompt, in which the template may have opened a reasoning block.
            tools: The JSON Schema of each tool's arguments, by the tool's name. Formats that write arguments as
                plain text (Qwen3-Coder, GLM, MiniMax) take their types from it; without it they are strings.
        """

    def call_grammar(self, tools: Tools, name: str | None = None, prompt_tail: Sequence[int] = ()) -> CallGrammar:
        """Return the grammar that forces a call of the tool `name`, or of any tool, on the next completion.

        Args:
            tools: As for `start`.
            name: The tool; None for any.
            prompt_tail: As for `start`: where the prompt opens reasoning, the call comes after it.

        Raises:
            NoCallGrammarError: The format has no grammar, or the tool is unknown.
        """


ParserFactory = Callable[["PreTrainedTokenizerBase"], ToolParser]
F = TypeVar("F", bound=ParserFactory)
_FACTORIES: dict[str, ParserFactory] = {}
_ALIASES: dict[str, str] = {}
"""Other names of our parsers, among them those that engines know them by."""


class UnknownParserError(ValueError):
    """No tool parser has the name."""


def register_tool_parser(name: str, *aliases: str, marks: Marks | None = None) -> Callable[[F], F]:
    """Register a parser class, or any function from tokenizer to parser, under a name.

    Args:
        name: The parser's name.
        aliases: Other names of it.
        marks: What chat templates that show its format have; without them "auto" does not know it.
    """

    def register(factory: F) -> F:
        _FACTORIES[name] = factory
        _ALIASES.update(dict.fromkeys(aliases, name))
        if marks is not None:
            register_marks(name, marks)
        return factory

    return register


def register_format(
    name: str,
    calls: CallFormat,
    *aliases: str,
    reasoning: ReasoningTags | None = THINK,
    marks: Marks | None = None,
) -> None:
    """Register a format of calls, with the reasoning that its family writes beside them; see `register_tool_parser`."""
    register_tool_parser(name, *aliases, marks=marks)(lambda tokenizer: TurnParser(tokenizer, calls, reasoning))


def known_tool_parsers() -> list[str]:
    """Return the names of all parsers, aliases and installed ones included."""
    return sorted({*_FACTORIES, *_ALIASES, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def choose_tool_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Detected:
    """Return the name of a parser and why it is the one: with "auto" what the chat template shows.

    Raises:
        DetectionError: With "auto", the chat template shows none, or several.
    """
    if name == AUTO:
        return detect_tool_parser(template_text(tokenizer))
    return Detected(name, "It was named by the user.")


def get_tool_parser(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    reasoning: str | None = None,
    tool_calls: ToolCalls = "strict",
) -> ToolParser:
    """Build a parser for a tokenizer.

    Args:
        name: The parser's name; "auto" takes the one that the chat template shows.
        tokenizer: Its added tokens decide which tags are tokens.
        reasoning: How reasoning is marked, by name (see `REASONING`), where it is not as the family's own.
        tool_calls: See `ToolCalls`. A loose call has the status LENIENT with "lenient", and MALFORMED with "strict". A
            parser of another package takes "lenient" where it has a method `leniently()` that returns such a parser.

    Raises:
        UnknownParserError: No parser or no reasoning has the name, or the parser's reasoning is its own, or it cannot
            read leniently; the message lists what there is.
        DetectionError: With "auto", the chat template shows none, or several.
    """
    if tool_calls not in get_args(ToolCalls):
        raise UnknownParserError(f"tool_calls must be 'strict' or 'lenient', not {tool_calls!r}.")
    parser = _with_reasoning(name, tokenizer, reasoning)
    if tool_calls == "strict":
        return parser
    leniently: Callable[[], ToolParser] | None = getattr(parser, "leniently", None)
    if leniently is None:
        raise UnknownParserError(f"The tool parser {name!r} reads calls in one way only: leave out tool_calls.")
    return leniently()


def _with_reasoning(name: str, tokenizer: PreTrainedTokenizerBase, reasoning: str | None) -> ToolParser:
    parser = _built(name, tokenizer)
    if reasoning is None:
        return parser
    if not isinstance(parser, TurnParser):
        raise UnknownParserError(f"The tool parser {name!r} reads its own reasoning: leave out {reasoning!r}.")
    if reasoning not in REASONING:
        raise UnknownParserError(f"There is no reasoning {reasoning!r}. Known: {', '.join(sorted(REASONING))}.")
    return TurnParser(tokenizer, parser.calls, REASONING[reasoning])


def control_strings(parser: ToolParser) -> frozenset[str]:
    """Return the texts of the tokens that a parser reads as markup, which no content may write (law 6).

    A parser of another package may say them in an attribute `control_strings`; without one it has none of its own.
    """
    markup = getattr(parser, "markup", None)
    return markup.strings if isinstance(markup, Markup) else frozenset(getattr(parser, "control_strings", ()))


def _built(name: str, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
    name = choose_tool_parser(name, tokenizer).name
    name = _ALIASES.get(name, name)
    if name in _FACTORIES:
        return _FACTORIES[name](tokenizer)
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        known = ", ".join([AUTO, *sorted({*_FACTORIES, *installed})])
        raise UnknownParserError(f"There is no tool parser {name!r}. Known parsers: {known}.")
    factory: ParserFactory = installed[name].load()
    return factory(tokenizer)
