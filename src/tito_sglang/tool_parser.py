"""Parsers of tool calls, by the names that strands-sglang had in 0.0."""

from tito_sglang.tool_parsers.base import UNKNOWN_TOOL_NAME, ToolParser, ToolParseResult
from tito_sglang.tool_parsers.hermes import HermesToolParser

__all__ = ["UNKNOWN_TOOL_NAME", "HermesToolCallParser", "ToolCallParseResult", "ToolCallParser"]

ToolCallParseResult = ToolParseResult
ToolCallParser = ToolParser


class HermesToolCallParser(HermesToolParser):
    """Qwen2.5, Qwen3 and Hermes.

    Args:
        bot_token: Text that starts a call.
        eot_token: Text that ends a call.
    """

    def __init__(self, bot_token: str | None = None, eot_token: str | None = None) -> None:
        super().__init__(bot_token, eot_token)
