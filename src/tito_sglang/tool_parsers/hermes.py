"""The calls of Qwen2.5, Qwen3 and Hermes."""

from tito_sglang.tool_parsers.base import FormatToolParser, register_tool_parser


@register_tool_parser("hermes")
class HermesToolParser(FormatToolParser):
    """Qwen2.5, Qwen3 and Hermes."""

    name = "hermes"
