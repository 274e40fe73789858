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

from tito_core.parsing import CallStatus, ParsedCall, known_tool_parsers
from tito_core.parsing import get_tool_parser as bound_parser
from tito_core.parsing.registry import ToolParser as CoreToolParser

UNKNOWN_TOOL_NAME = "unknown_tool"


@dataclass(frozen=True)
class ToolParseResult:
    """One tool call found in a text.

    Attributes:
        id: The call's id.
        name: The tool's name; `UNKNOWN_NAME` if the text does not name it for certain.
        input: The arguments; empty for a malformed call.
        raw: The text of a malformed call without its tags, else None.
    """

    UNKNOWN_NAME: ClassVar[str] = UNKNOWN_TOOL_NAME

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
_PATTERNS = ("ARG_PATTERN", "SECTION_PATTERN", "CALL_PATTERN")
_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')


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
    """A format of the core, by name.

    `SGLangModel` reads the sampled ids with the core's parser and does not call `parse`. With other tokens, or patterns
    that were replaced, it calls `parse`, as for a subclass with a `parse` of its own.

    Attributes:
        name: The core's name of the format.
        values_are_text: Whether the format writes values without quotes, so that only a schema tells "1" from 1.
    """

    name: ClassVar[str]
    values_are_text: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse to replace a pattern of the class, which nothing reads.

        Raises:
            TypeError: The subclass replaces it, and has no `parse` of its own.
        """
        super().__init_subclass__(**options)
        replaced = [name for name in _PATTERNS if name in vars(cls) and hasattr(super(cls, cls), name)]
        if replaced and cls.parse is FormatToolParser.parse:
            raise TypeError(
                f"{cls.__name__} replaces {', '.join(replaced)}, which is not used. Implement parse in the subclass."
            )

    def parse(self, text: str) -> list[ToolParseResult]:
        """Return the calls in a text in which the format's tags are spelled out. Nothing malformed is repaired.

        A value that the format writes without quotes is decoded if it is JSON, since no schema is at hand.
        """
        prefix = uuid.uuid4().hex[:8]
        calls = self._standard_calls(text) if self.is_standard() else self._matched_calls(text)
        return [self._result(call, f"call_{prefix}{number:04d}") for number, call in enumerate(calls)]

    def is_standard(self) -> bool:
        """Return whether the tokens and the patterns are those of the format."""
        plain = _Plain(*(getattr(self, f"DEFAULT_{name.upper()}") for name in _TOKENS))
        return all(getattr(self, name) == getattr(plain, name) for name in (*_TOKENS, "tool_pattern", "think_pattern"))

    def body_of(self, raw: str) -> str:
        """Return the text of a call without its tags."""
        return raw.strip().removeprefix(self.tool_start_token).removesuffix(self.tool_end_token).strip()

    def sampled_id(self, raw: str) -> str | None:
        """Return the id that a malformed call has in its text; None if the format writes none."""
        return None

    def wrapped(self, body: str) -> str:
        """Return the format's own text of a call."""
        return f"{self.DEFAULT_TOOL_START_TOKEN}{body}{self.DEFAULT_TOOL_END_TOKEN}"

    def _standard_calls(self, text: str) -> tuple[ParsedCall, ...]:
        session = _character_parser(self.name).start()
        session.feed([ord(character) for character in text])
        return session.finish(truncated=False).calls

    def _matched_calls(self, text: str) -> list[ParsedCall]:
        matches = self.tool_pattern.finditer(self.think_pattern.sub("", text))
        return [self._matched_call(match) for match in matches]

    def _matched_call(self, match: re.Match[str]) -> ParsedCall:
        body = (match.group(1) if self.tool_pattern.groups else match.group()).strip()
        calls = self._standard_calls(self.wrapped(body))
        if len(calls) == 1:
            return calls[0]
        return ParsedCall(CallStatus.MALFORMED, None, None, body, 0, 0, "It is not one call.")

    def _result(self, call: ParsedCall, call_id: str) -> ToolParseResult:
        call_id = call.id or call_id
        if call.status.runs and call.name is not None:
            arguments = dict(call.arguments or {})
            if self.values_are_text:
                arguments = {name: _decoded(value) for name, value in arguments.items()}
            return ToolParseResult(call_id, call.name, arguments)
        body = self.body_of(call.raw)
        call_id = self.sampled_id(call.raw) or call_id
        return ToolParseResult.from_parse_error(call_id, body, call.name or _written_name(body))


class _Plain(ToolParser):
    def parse(self, text: str) -> list[ToolParseResult]:
        return []


def parses_text(parser: ToolParser) -> bool:
    """Return whether calls are found in text by `parse`, and not by token id."""
    if getattr(parser.parse, "__func__", None) is not FormatToolParser.parse:
        return True
    return isinstance(parser, FormatToolParser) and not parser.is_standard()


def _decoded(value: Any) -> Any:
    """Return the value that a text is as JSON, or else the text."""
    try:
        return json.loads(value, parse_constant=_refused) if isinstance(value, str) else value
    except ValueError:
        return value


def _refused(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are not JSON


def _written_name(body: str) -> str | None:
    """Return the name that a malformed call may mean, for counts of errors; such a call never runs."""
    match = _NAME.search(body)
    return match[1] if match else None


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


@cache
def _character_parser(name: str) -> CoreToolParser:
    return bound_parser(name, cast(Any, _CharacterTokenizer()))


class _CharacterTokenizer:
    """A vocabulary of single characters. It has no control tokens, so tags are found by their text."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_ids: ClassVar[list[int]] = []

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))
