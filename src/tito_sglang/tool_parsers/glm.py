"""The calls of GLM 4.5 to 5."""

import re
from typing import ClassVar

from tito_sglang.tool_parsers.base import FormatToolParser, register_tool_parser


@register_tool_parser("glm")
class GLMToolParser(FormatToolParser):
    """GLM 4.5 to 5.

    Attributes:
        ARG_PATTERN: Matches an argument; group 1 is its name, group 2 its value.
    """

    name = "glm"
    values_are_text = True
    ARG_PATTERN: ClassVar[re.Pattern[str]] = re.compile(
        r"\s*".join(f"<{tag}>\\s*(.*?)\\s*</{tag}>" for tag in ("arg_key", "arg_value")), re.DOTALL
    )
