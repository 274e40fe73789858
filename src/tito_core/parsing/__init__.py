"""Completion token ids to reasoning, text and tool calls; one file a format."""

from tito_core.parsing import formats as _formats  # each registers itself
from tito_core.parsing.completion import Tools
from tito_core.parsing.detection import Detected, DetectionError, detect_tool_parser
from tito_core.parsing.grammar import CallGrammar, NoCallGrammarError
from tito_core.parsing.parsed import CallStatus, ParsedCall, ParsedTurn
from tito_core.parsing.registry import (
    ParserSession,
    ToolParser,
    UnknownParserError,
    control_strings,
    get_tool_parser,
    known_tool_parsers,
    register_format,
    register_tool_parser,
)

__all__ = [
    "CallGrammar",
    "CallStatus",
    "Detected",
    "DetectionError",
    "NoCallGrammarError",
    "ParsedCall",
    "ParsedTurn",
    "ParserSession",
    "ToolParser",
    "Tools",
    "UnknownParserError",
    "control_strings",
    "detect_tool_parser",
    "get_tool_parser",
    "known_tool_parsers",
    "register_format",
    "register_tool_parser",
]
del _formats
