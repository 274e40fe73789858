"""Parse a completion's token ids into reasoning, text and tool calls. The formats are in `formats/`."""

from tito_core.parsing import formats as _formats  # importing a format registers it
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import CallStatus, ParsedCall, ParsedTurn, Tools
from tito_core.parsing.grammar import CallGrammar, NoCallGrammarError
from tito_core.parsing.registry import (
    Detected,
    DetectionError,
    Marks,
    ParserSession,
    ToolCalls,
    ToolParser,
    UnknownParserError,
    control_strings,
    detect_tool_parser,
    get_tool_parser,
    known_tool_parsers,
    register_format,
    register_tool_parser,
)

__all__ = [
    "CallFormat",
    "CallGrammar",
    "CallStatus",
    "Detected",
    "DetectionError",
    "Marks",
    "NoCallGrammarError",
    "ParsedCall",
    "ParsedTurn",
    "ParserSession",
    "ToolCalls",
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
