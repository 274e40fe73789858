"""The calls of GLM 4.5 to 5."""

from tito_sglang.tool_parsers.base import FormatToolParser, register_tool_parser


@register_tool_parser("glm")
class GLMToolParser(FormatToolParser):
    """GLM 4.5 to 5."""

    name = "glm"
