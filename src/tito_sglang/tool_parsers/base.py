"""The base classes of tool-call parsers, and their registry."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

from tito_core.parsing import ParsedCall, known_tool_parsers
from tito_core.parsing import get_tool_parser as bound_parser
from tito_core.parsing.registry import ToolParser as CoreToolParser


@dataclass(frozen=True)
class ToolParseResult:
    """One tool call found in a text.

    Attributes:
        id: The call's id.
        name: The tool's name; `UNKNOWN_NAME` if the text does not name it for certain.
        input: The arguments; empty for a malformed call.
        raw: The text of a malformed call, else None.
    """

    UNKNOWN_NAME: ClassVar[str] = "unknown_tool"

    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)
    raw: str | None = None

    @classmethod
    def from_parse_error(cls, id: str, raw: str, name: str | None = None) -> ToolParseResult:
        """Return a malformed call."""
        return cls(id, cls.UNKNOWN_NAME if name is None else name, {}, raw)

    @property
    def is_error(self) -> bool:
        """Whether the call is malformed."""
        return self.raw is not None

    @property
    def payload(self) -> str:
        """The arguments as JSON, or the text of a malformed call."""
        return json.dumps(self.input) if self.raw is None else self.raw


_TOKENS = ("tool_start_token", "tool_end_token", "think_start_token", "think_end_token")


class ToolParser(ABC):
    """Finds the tool calls in a text. A subclass implements `parse`.

    `SGLangModel` gives a subclass the text of each answer without its reasoning. The sampled ids are recorded as they
    came. Each call is recorded with the status "lenient", because it was found in text and not by token id.

    Args:
        tool_start_token: Text that starts a call.
        tool_end_token: Text that ends a call.
        think_start_token: Text that starts reasoning.
        think_end_token: Text that ends reasoning.

    Attributes:
        tool_pattern: Regular expression of a call; group 1 is what is between the tokens.
        think_pattern: Regular expression of a reasoning block.
    """

    DEFAULT_TOOL_START_TOKEN: ClassVar[str] = "<tool_call>"
    DEFAULT_TOOL_END_TOKEN: ClassVar[str] = "</tool_call>"
    DEFAULT_THINK_START_TOKEN: ClassVar[str] = "<think>"
    DEFAULT_THINK_END_TOKEN: ClassVar[str] = "</think>"

    def __init__(
        self,
        tool_start_token: str | None = None,
        tool_end_token: str | None = None,
        think_start_token: str | None = None,
        think_end_token: str | None = None,
    ) -> None:
        self.tool_start_token = tool_start_token or self.DEFAULT_TOOL_START_TOKEN
        self.tool_end_token = tool_end_token or self.DEFAULT_TOOL_END_TOKEN
        self.think_start_token = think_start_token or self.DEFAULT_THINK_START_TOKEN
        self.think_end_token = think_end_token or self.DEFAULT_THINK_END_TOKEN
        call = rf"{re.escape(self.tool_start_token)}\s*(.*?)\s*{re.escape(self.tool_end_token)}"
        self.tool_pattern = re.compile(call, re.DOTALL)
        thought = f"{re.escape(self.think_start_token)}.*?{re.escape(self.think_end_token)}"
        self.think_pattern = re.compile(thought, re.DOTALL)

    @abstractmethod
    def parse(self, text: str) -> list[ToolParseResult]:
        """Return the calls in a text, in order."""


class FormatToolParser(ToolParser):
    """A format of the core, by name. `SGLangModel` reads the sampled ids with the core's parser and not `parse`.

    Attributes:
        name: The core's name of the format.
    """

    name: ClassVar[str]

    def __init__(
        self,
        tool_start_token: str | None = None,
        tool_end_token: str | None = None,
        think_start_token: str | None = None,
        think_end_token: str | None = None,
    ) -> None:
        """Check the tokens.

        Raises:
            ValueError: A token differs from the format's, and the class has no `parse` of its own.
        """
        super().__init__(tool_start_token, tool_end_token, think_start_token, think_end_token)
        for token in () if parses_text(self) else _TOKENS:
            if (value := getattr(self, token)) != getattr(self, f"DEFAULT_{token.upper()}"):
                raise ValueError(
                    f"{token}={value!r} is not part of the format {self.name!r}. Implement parse in a subclass, or "
                    "register the format with tito_core.parsing.register_format and pass its name as tool_parser."
                )

    def parse(self, text: str) -> list[ToolParseResult]:
        """Return the calls in a text in which the format's tags are spelled out. Nothing malformed is repaired."""
        self.check_patterns()
        session = _character_parser(self.name).start()
        session.feed([ord(character) for character in text])
        calls = session.finish(truncated=False).calls
        prefix = uuid.uuid4().hex[:8]
        return [_result(call, f"call_{prefix}{number:04d}") for number, call in enumerate(calls)]

    def check_patterns(self) -> None:
        """Refuse other regular expressions: this class reads with the core's parser.

        Raises:
            ValueError: `tool_pattern` or `think_pattern` was replaced.
        """
        plain = _Patterns(self.tool_start_token, self.tool_end_token, self.think_start_token, self.think_end_token)
        for name in ("tool_pattern", "think_pattern"):
            if getattr(self, name) != getattr(plain, name):
                raise ValueError(
                    f"{name} of the format {self.name!r} was replaced, but it is not used. Implement parse in a "
                    "subclass of ToolParser."
                )


class _Patterns(ToolParser):
    def parse(self, text: str) -> list[ToolParseResult]:
        return []


def parses_text(parser: ToolParser) -> bool:
    """Return whether a parser has a `parse` of its own, so that calls are found in text and not by token id."""
    return getattr(parser.parse, "__func__", None) is not FormatToolParser.parse


TOOL_PARSER_REGISTRY: dict[str, type[ToolParser]] = {}
"""The registered classes. `get_tool_parser` knows every format of the core, too."""

P = TypeVar("P", bound=type[ToolParser])


def register_tool_parser(name: str) -> Callable[[P], P]:
    """Return a decorator that registers a parser class under a name."""

    def register(parser: P) -> P:
        TOOL_PARSER_REGISTRY[name] = parser
        return parser

    return register


def get_tool_parser(name: str, **tokens: str) -> ToolParser:
    """Return a parser by its registered name or by the core's name of its format.

    Raises:
        KeyError: Unknown name.
    """
    parser = TOOL_PARSER_REGISTRY.get(name)
    if parser is None:
        if name not in known_tool_parsers():
            known = ", ".join(sorted({*TOOL_PARSER_REGISTRY, *known_tool_parsers()}))
            raise KeyError(f"Unknown tool parser: {name!r}. Available: {known}")
        parser = type(f"ToolParser_{name}", (FormatToolParser,), {"name": name})
    return parser(**tokens)


def _result(call: ParsedCall, call_id: str) -> ToolParseResult:
    call_id = call.id or call_id
    if call.status.runs and call.name is not None:
        return ToolParseResult(call_id, call.name, dict(call.arguments or {}))
    return ToolParseResult.from_parse_error(call_id, call.raw, call.name)


@cache
def _character_parser(name: str) -> CoreToolParser:
    return bound_parser(name, cast(Any, _CharacterTokenizer()))


class _CharacterTokenizer:
    """A vocabulary of single characters. It has no control tokens, so tags are found by their text."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_ids: ClassVar[list[int]] = []

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))
