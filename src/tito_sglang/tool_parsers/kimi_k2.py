"""The calls of Kimi K2."""

from tito_sglang.tool_parsers.base import FormatToolParser, register_tool_parser


@register_tool_parser("kimi_k2")
class KimiK2ToolParser(FormatToolParser):
    """Kimi K2."""

    name = "kimi_k2"
    DEFAULT_TOOL_START_TOKEN = "<|tool_call_begin|>"
    DEFAULT_TOOL_END_TOKEN = "<|tool_call_end|>"
