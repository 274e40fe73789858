"""Tool-call formats by the names that users of strands-sglang know; the core's strict parsers read them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from tito_core.parsing import ParsedCall, UnknownParserError, known_tool_parsers
from tito_core.parsing import get_tool_parser as bound_parser


@dataclass(frozen=True)
class ToolParseResult:
    """A call in a text.

    Attributes:
        id: Its id.
        name: The tool's name; `UNKNOWN_NAME` where the text does not say it for certain.
        input: Its arguments; empty where it is not sound.
        raw: Its whole text, markup included, where it is not sound.
    """

    UNKNOWN_NAME: ClassVar[str] = "unknown_tool"

    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None

    @classmethod
    def from_parse_error(cls, id: str, raw: str, name: str | None = None) -> ToolParseResult:
        """Return a call that is not sound."""
        return cls(id, cls.UNKNOWN_NAME if name is None else name, {}, raw)

    @property
    def is_error(self) -> bool:
        """Whether it is not sound."""
        return self.raw is not None

    @property
    def payload(self) -> str:
        """The arguments as JSON, or the text of a call that is not sound."""
        return json.dumps(self.input) if self.raw is None else self.raw


class ToolParser:
    """A format of tool calls by name. `SGLangModel` reads sampled ids with it, and never this text.

    Attributes:
        name: The core's name of the format.
    """

    name: ClassVar[str]
    tool_start_token = "<tool_call>"
    tool_end_token = "</tool_call>"
    think_start_token = "<think>"
    think_end_token = "</think>"

    def __init__(self, **tokens: str) -> None:
        """Take the tags only as the format has them.

        Raises:
            ValueError: A tag is another: then it is another format, and needs a parser of its own.
        """
        for tag, value in tokens.items():
            if getattr(type(self), tag, None) != value:
                raise ValueError(
                    f"{tag}={value!r} is not how the format {self.name!r} is written. Register the other format by "
                    "tito_core.parsing.register_format, and give its name as tool_parser."
                )

    def parse(self, text: str) -> list[ToolParseResult]:
        """Read the calls in a text in which tags are spelled out, strictly: what is malformed is not repaired."""
        session = bound_parser(self.name, cast(Any, _Characters())).start()
        session.feed([ord(character) for character in text])
        calls = session.finish(truncated=False).calls
        prefix = uuid.uuid4().hex[:8]
        return [_result(call, f"call_{prefix}{number:04d}") for number, call in enumerate(calls)]


class HermesToolParser(ToolParser):
    """Qwen2.5, Qwen3 and Hermes."""

    name = "hermes"


class QwenXMLToolParser(ToolParser):
    """Qwen3-Coder and Qwen3.5."""

    name = "qwen3_coder"


class GLMToolParser(ToolParser):
    """GLM 4.5 to 5."""

    name = "glm"


class KimiK2ToolParser(ToolParser):
    """Kimi K2."""

    name = "kimi_k2"
    tool_start_token = "<|tool_call_begin|>"
    tool_end_token = "<|tool_call_end|>"


TOOL_PARSER_REGISTRY: dict[str, type[ToolParser]] = {
    "glm": GLMToolParser,
    "hermes": HermesToolParser,
    "kimi_k2": KimiK2ToolParser,
    "qwen_xml": QwenXMLToolParser,
}
"""The classes that have a name of their own; `get_tool_parser` gives every format of the core."""


def get_tool_parser(name: str, **tokens: str) -> ToolParser:
    """Return a parser by strands-sglang's name of its format, or by ours.

    Raises:
        KeyError: There is no such format.
    """
    kind = TOOL_PARSER_REGISTRY.get(name)
    if kind is None:
        if name not in known_tool_parsers():
            known = ", ".join(sorted({*TOOL_PARSER_REGISTRY, *known_tool_parsers()}))
            raise KeyError(f"Unknown tool parser: {name!r}. Available: {known}")
        kind = type(f"ToolParser_{name}", (ToolParser,), {"name": name})
    return kind(**tokens)


def format_of(parser: ToolParser | str | None) -> str:
    """Return the core's name of a parser's format; "auto" for None, which takes what the chat template shows.

    Raises:
        UnknownParserError: It is a parser of text.
    """
    if parser is None or isinstance(parser, str):
        return parser or "auto"
    name = getattr(parser, "name", None)
    if not isinstance(parser, ToolParser) or not isinstance(name, str) or type(parser).parse is not ToolParser.parse:
        raise UnknownParserError(
            f"{parser!r} parses text, and here calls are read out of the sampled ids: register its format by "
            "tito_core.parsing.register_format, and give the name as tool_parser."
        )
    return name


def _result(call: ParsedCall, call_id: str) -> ToolParseResult:
    call_id = call.id or call_id
    if call.status.runs and call.name is not None:
        return ToolParseResult(call_id, call.name, dict(call.arguments or {}))
    return ToolParseResult.from_parse_error(call_id, call.raw, call.name)


class _Characters:
    """A vocabulary of characters, which has no control tokens, so that tags are read by their text."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_ids: ClassVar[list[int]] = []

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))
