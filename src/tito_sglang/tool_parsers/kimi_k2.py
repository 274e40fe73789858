"""The calls of Kimi K2."""

import re
from typing import ClassVar

from tito_sglang.tool_parsers.base import FormatToolParser, register_tool_parser

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"


@register_tool_parser("kimi_k2")
class KimiK2ToolParser(FormatToolParser):
    """Kimi K2.

    Attributes:
        SECTION_PATTERN: Matches the calls of an answer; group 1 is what is between the tags.
        CALL_PATTERN: Matches a call, with the groups "tool_call_id" and "arguments".
    """

    name = "kimi_k2"
    DEFAULT_TOOL_START_TOKEN = "<|tool_call_begin|>"
    DEFAULT_TOOL_END_TOKEN = "<|tool_call_end|>"
    SECTION_PATTERN: ClassVar[re.Pattern[str]] = re.compile("(.*?)".join(map(re.escape, _SECTION)), re.DOTALL)
    CALL_PATTERN: ClassVar[re.Pattern[str]] = re.compile(
        rf"{re.escape(DEFAULT_TOOL_START_TOKEN)}\s*(?P<tool_call_id>[^<\s]+)\s*{re.escape(_ARGUMENTS)}\s*"
        rf"(?P<arguments>.*?)\s*{re.escape(DEFAULT_TOOL_END_TOKEN)}",
        re.DOTALL,
    )

    def body_of(self, raw: str) -> str:
        """Return the arguments of a call, if it has them; else its text without tags."""
        return super().body_of(raw).partition(_ARGUMENTS)[2].strip() or super().body_of(raw)

    def sampled_id(self, raw: str) -> str | None:
        """Return the id that a malformed call has in its text, if it has one."""
        match = self.CALL_PATTERN.search(raw)
        return match["tool_call_id"] if match else None

    def wrapped(self, body: str) -> str:
        """Return the format's own text of a call."""
        return f"{_SECTION[0]}{super().wrapped(body)}{_SECTION[1]}"
