"""Tool-call parsers by the names that users of strands-sglang import."""

from tito_sglang.tool_parsers.base import (
    TOOL_PARSER_REGISTRY,
    UNKNOWN_TOOL_NAME,
    FormatToolParser,
    ToolParser,
    ToolParseResult,
    get_tool_parser,
    register_tool_parser,
)
from tito_sglang.tool_parsers.glm import GLMToolParser
from tito_sglang.tool_parsers.hermes import HermesToolParser
from tito_sglang.tool_parsers.kimi_k2 import KimiK2ToolParser
from tito_sglang.tool_parsers.qwen_xml import QwenXMLToolParser

__all__ = [
    "TOOL_PARSER_REGISTRY",
    "UNKNOWN_TOOL_NAME",
    "FormatToolParser",
    "GLMToolParser",
    "HermesToolParser",
    "KimiK2ToolParser",
    "QwenXMLToolParser",
    "ToolParseResult",
    "ToolParser",
    "get_tool_parser",
    "register_tool_parser",
]
