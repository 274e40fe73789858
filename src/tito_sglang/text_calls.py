"""Calls that a user's own `ToolParser.parse` finds in the text of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tito_core.model import Policy
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import CallStatus, ParsedCall, ParsedTurn, Tools
from tito_core.parsing.grammar import CallGrammar
from tito_core.parsing.markup import DecodedIds
from tito_core.parsing.registry import AUTO, Detected, UnknownParserError
from tito_core.parsing.registry import ToolParser as CoreToolParser
from tito_core.parsing.turn import ReasoningTags, TurnParser, TurnSession
from tito_sglang.tool_parsers import (
    TOOL_PARSER_REGISTRY,
    FormatToolParser,
    ToolParser,
    ToolParseResult,
    get_tool_parser,
)
from tito_sglang.tool_parsers.base import parses_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEFAULT_FORMAT = "hermes"
"""Content may not produce the control tokens of this format, if the user's parser extends none."""


def resolve(parser: ToolParser | str | None) -> tuple[str, ToolParser | None]:
    """Return the core's name of a parser's format, and the parser if it finds calls in text.

    None is "auto", which detects the format from the chat template.

    Raises:
        UnknownParserError: It is neither a name nor a `ToolParser`.
    """
    if parser is None:
        return AUTO, None
    if isinstance(parser, str):
        if parser not in TOOL_PARSER_REGISTRY:
            return parser, None
        parser = get_tool_parser(parser)
    if not isinstance(parser, ToolParser):
        raise UnknownParserError(
            f"tool_parser must be a name or a subclass of tito_sglang.tool_parsers.ToolParser, not {parser!r}."
        )
    name = parser.name if isinstance(parser, FormatToolParser) else _DEFAULT_FORMAT
    return name, parser if parses_text(parser) else None


def with_text_parser(policy: Policy, parser: ToolParser) -> Policy:
    """Return a copy of a policy in which a user's parser finds the calls."""
    name = type(parser).__name__
    detected = Detected(name, f"The user's {name}.parse finds calls in the text of an answer.")
    grammars = policy.parser if isinstance(parser, FormatToolParser) else None
    return replace(policy, parser=TextCallParser(parser, grammars, policy.tokenizer), detected=detected)


class TextCallParser(TurnParser):
    """Parses reasoning by token id, and passes the rest as text to a user's parser, which finds the calls.

    Args:
        parser: The user's parser.
        grammars: The core's parser of the format that it extends, for the grammars of forced calls; None if it
            extends none.
        tokenizer: The policy's tokenizer.
    """

    preview = None  # type: ignore[assignment]  # text is not streamed: a call may be found anywhere in it

    def __init__(self, parser: ToolParser, grammars: CoreToolParser | None, tokenizer: PreTrainedTokenizerBase) -> None:
        start = getattr(parser, "think_start_token", ToolParser.DEFAULT_THINK_START_TOKEN)
        end = getattr(parser, "think_end_token", ToolParser.DEFAULT_THINK_END_TOKEN)
        super().__init__(tokenizer, CallFormat(), ReasoningTags(start, end))
        self.user_parser = parser
        self.call_pattern: re.Pattern[str] | None = getattr(parser, "tool_pattern", None)
        self._grammars = grammars

    def start(self, prompt_tail: Sequence[int] = (), tools: Tools | None = None) -> TurnSession:
        """Start reading a completion; see `TurnParser.start`."""
        return _TextSession(self, self._in_reasoning(prompt_tail), tools)

    def call_grammar(self, tools: Tools, name: str | None = None, prompt_tail: Sequence[int] = ()) -> CallGrammar:
        """Return the grammar of a forced call in the format that the user's parser extends.

        Raises:
            NoCallGrammarError: It extends none.
        """
        if self._grammars is None:
            return super().call_grammar(tools, name, prompt_tail)
        return self._grammars.call_grammar(tools, name, prompt_tail)


class _TextSession(TurnSession):
    _parser: TextCallParser

    def finish(self, *, truncated: bool) -> ParsedTurn:
        """Read everything that was fed, and pass the text to the user's parser."""
        turn = super().finish(truncated=truncated)
        results = self._parser.user_parser.parse(turn.text)
        if not results:
            return turn
        pattern, text = self._parser.call_pattern, turn.text
        matches = [] if pattern is None else list(pattern.finditer(text))
        raws = [result.raw or "" for result in results]
        if pattern is not None and len(matches) == len(results):  # else it is unknown which text is which call
            raws = [match.group() for match in matches]
            text = pattern.sub("", text).strip()
        return replace(turn, text=text, calls=tuple(self._calls(results, raws)), suspects=())

    def _calls(self, results: Sequence[ToolParseResult], raws: Sequence[str]) -> Iterable[ParsedCall]:
        source = f"by {type(self._parser.user_parser).__name__}.parse in the text of the answer"
        decoded, at = DecodedIds(self._parser.markup.decode, self._ids), 0
        for result, raw in zip(results, raws, strict=True):
            found = decoded.text.find(raw, at) if raw else -1
            start, stop = (0, len(self._ids)) if found < 0 else decoded.span_of(found, found + len(raw))
            at = max(at, found + len(raw))
            arguments: Any = result.input
            if result.is_error or not isinstance(arguments, Mapping):
                name = None if result.name == ToolParseResult.UNKNOWN_NAME else result.name
                reason = f"The call cannot be read. It was found {source}."
                yield ParsedCall(CallStatus.MALFORMED, name, None, raw or result.payload, start, stop, reason)
            else:
                reason = f"The call was found {source}, not by token id."
                call_id = result.id if isinstance(result.id, str) else None
                yield ParsedCall(CallStatus.LENIENT, result.name, dict(arguments), raw, start, stop, reason, call_id)
