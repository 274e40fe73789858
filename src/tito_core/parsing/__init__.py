"""Completion token ids to reasoning, text and tool calls; one file a format."""

from tito_core.parsing import hermes as _hermes  # registers itself
from tito_core.parsing.parsed import CallStatus, ParsedCall, ParsedTurn
from tito_core.parsing.registry import (
    ParserSession,
    ToolParser,
    UnknownParserError,
    get_tool_parser,
    register_tool_parser,
)

__all__ = [
    "CallStatus",
    "ParsedCall",
    "ParsedTurn",
    "ParserSession",
    "ToolParser",
    "UnknownParserError",
    "get_tool_parser",
    "register_tool_parser",
]
del _hermes
