"""The calls of Qwen3-Coder and Qwen3.5."""

from tito_sglang.tool_parsers.base import FormatToolParser, register_tool_parser


@register_tool_parser("qwen_xml")
class QwenXMLToolParser(FormatToolParser):
    """Qwen3-Coder and Qwen3.5."""

    name = "qwen3_coder"
    values_are_text = True
