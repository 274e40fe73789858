"""Tool parsers by name: ours, and those that other packages install under the entry points `tito.tool_parsers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol, TypeVar

from tito_core.parsing.parsed import ParsedTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENTRY_POINT_GROUP = "tito.tool_parsers"


class ParserSession(Protocol):
    """Parses one completion. The result does not depend on how the ids are split over `feed` calls."""

    def feed(self, ids: Sequence[int]) -> None:
        """Take the next sampled ids."""

    def finish(self, *, truncated: bool) -> ParsedTurn:
        """Give the parsed completion. `truncated` says that the engine stopped for length."""


class ToolParser(Protocol):
    """A format of reasoning and tool calls, bound to a tokenizer. Stateless; shared by all rollouts."""

    def start(self, prompt_tail: Sequence[int] = ()) -> ParserSession:
        """Begin a completion.

        Args:
            prompt_tail: The last ids of the prompt, in which the template may have opened a reasoning block.
        """


ParserFactory = Callable[["PreTrainedTokenizerBase"], ToolParser]
F = TypeVar("F", bound=ParserFactory)
_FACTORIES: dict[str, ParserFactory] = {}


class UnknownParserError(ValueError):
    """No tool parser has the name."""


def register_tool_parser(name: str) -> Callable[[F], F]:
    """Register a parser class, or any function from tokenizer to parser, under a name."""

    def register(factory: F) -> F:
        _FACTORIES[name] = factory
        return factory

    return register


def get_tool_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
    """Build the parser called `name` for a tokenizer.

    Raises:
        UnknownParserError: No parser has the name; the message lists those that exist.
    """
    if name in _FACTORIES:
        return _FACTORIES[name](tokenizer)
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        known = ", ".join(sorted({*_FACTORIES, *installed}))
        raise UnknownParserError(f"There is no tool parser {name!r}. Known parsers: {known}.")
    factory: ParserFactory = installed[name].load()
    return factory(tokenizer)
