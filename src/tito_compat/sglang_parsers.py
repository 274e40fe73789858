"""Tool-call parsers by the names that users of strands-sglang import, and the use of a user's own parser in a turn.

A parser of ours names a format of the core, which reads calls by token id. A subclass with a `parse` of its own finds
them in the text of an answer (`with_text_parser`). `ToolCallParser`, `ToolCallParseResult` and `HermesToolCallParser`
are names that strands-sglang had in 0.0.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from tito_compat.model import UNKNOWN_TOOL_NAME
from tito_core.model import Policy
from tito_core.parsing import CallStatus, ParsedCall, known_tool_parsers
from tito_core.parsing import get_tool_parser as bound_parser
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import ParsedTurn, Tools
from tito_core.parsing.grammar import CallGrammar
from tito_core.parsing.markup import DecodedIds
from tito_core.parsing.registry import AUTO, Detected, UnknownParserError
from tito_core.parsing.registry import ToolParser as CoreToolParser
from tito_core.parsing.turn import ReasoningTags, TurnParser, TurnSession

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "TOOL_PARSER_REGISTRY",
    "UNKNOWN_TOOL_NAME",
    "FormatToolParser",
    "GLMToolParser",
    "HermesToolCallParser",
    "HermesToolParser",
    "KimiK2ToolParser",
    "QwenXMLToolParser",
    "ToolCallParseResult",
    "ToolCallParser",
    "ToolParseResult",
    "ToolParser",
    "get_tool_parser",
    "register_tool_parser",
    "resolve",
    "with_text_parser",
]


P = TypeVar("P", bound="type[ToolParser]")
_TOKENS = ("tool_start_token", "tool_end_token", "think_start_token", "think_end_token")
_PATTERNS = ("ARG_PATTERN", "SECTION_PATTERN", "CALL_PATTERN")
_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_DEFAULT_FORMAT = "hermes"
"""Content may not produce the control tokens of this format, if the user's parser extends none."""
TOOL_PARSER_REGISTRY: dict[str, type[ToolParser]] = {}
"""The registered classes. `get_tool_parser` knows every format of the core, too."""


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


@register_tool_parser("hermes")
class HermesToolParser(FormatToolParser):
    """Qwen2.5, Qwen3 and Hermes."""

    name = "hermes"


@register_tool_parser("qwen_xml")
class QwenXMLToolParser(FormatToolParser):
    """Qwen3-Coder and Qwen3.5."""

    name = "qwen3_coder"
    values_are_text = True


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


def resolve(parser: ToolParser | str | None) -> tuple[str, ToolParser | None]:
    """Return the core's name of a parser's format, and the parser if it finds calls in text.

    None is "auto", which detects the format from the chat template.

    Raises:
        UnknownParserError: It is neither a name nor a `ToolParser`.
    """
    if parser is None:
        return AUTO, None
    if isinstance(parser, str):
        if parser not in TOOL_PARSER_REGISTRY:
            return parser, None
        parser = get_tool_parser(parser)
    if not isinstance(parser, ToolParser):
        raise UnknownParserError(
            f"tool_parser must be a name or a subclass of tito_sglang.tool_parsers.ToolParser, not {parser!r}."
        )
    name = parser.name if isinstance(parser, FormatToolParser) else _DEFAULT_FORMAT
    return name, parser if _parses_text(parser) else None


def with_text_parser(policy: Policy, parser: ToolParser) -> Policy:
    """Return a copy of a policy in which a user's parser finds the calls."""
    name = type(parser).__name__
    detected = Detected(name, f"The user's {name}.parse finds calls in the text of an answer.")
    grammars = policy.parser if isinstance(parser, FormatToolParser) else None
    return replace(policy, parser=_TextCallParser(parser, grammars, policy.tokenizer), detected=detected)


class _TextCallParser(TurnParser):
    """Parses reasoning by token id, and passes the rest as text to a user's parser, which finds the calls.

    Args:
        parser: The user's parser.
        grammars: The core's parser of the format that it extends, for the grammars of forced calls; None if it
            extends none.
        tokenizer: The policy's tokenizer.
    """

    preview = None  # type: ignore[assignment]  # text is not streamed: a call may be found anywhere in it

    def __init__(self, parser: ToolParser, grammars: CoreToolParser | None, tokenizer: PreTrainedTokenizerBase) -> None:
        start = getattr(parser, "think_start_token", ToolParser.DEFAULT_THINK_START_TOKEN)
        end = getattr(parser, "think_end_token", ToolParser.DEFAULT_THINK_END_TOKEN)
        super().__init__(tokenizer, CallFormat(), ReasoningTags(start, end))
        self.user_parser = parser
        self.call_pattern: re.Pattern[str] | None = getattr(parser, "tool_pattern", None)
        self._grammars = grammars

    def start(self, prompt_tail: Sequence[int] = (), tools: Tools | None = None) -> TurnSession:
        """Start reading a completion; see `TurnParser.start`."""
        return _TextSession(self, self._in_reasoning(prompt_tail), tools)

    def call_grammar(self, tools: Tools, name: str | None = None, prompt_tail: Sequence[int] = ()) -> CallGrammar:
        """Return the grammar of a forced call in the format that the user's parser extends.

        Raises:
            NoCallGrammarError: It extends none.
        """
        if self._grammars is None:
            return super().call_grammar(tools, name, prompt_tail)
        return self._grammars.call_grammar(tools, name, prompt_tail)


class _TextSession(TurnSession):
    _parser: _TextCallParser

    def finish(self, *, truncated: bool) -> ParsedTurn:
        """Read everything that was fed, and pass the text to the user's parser."""
        turn = super().finish(truncated=truncated)
        results = self._parser.user_parser.parse(turn.text)
        if not results:
            return turn
        pattern, text = self._parser.call_pattern, turn.text
        matches = [] if pattern is None else list(pattern.finditer(text))
        raws = [result.raw or "" for result in results]
        if pattern is not None and len(matches) == len(results):  # else it is unknown which text is which call
            raws = [match.group() for match in matches]
            text = pattern.sub("", text).strip()
        return replace(turn, text=text, calls=tuple(self._calls(results, raws)), suspects=())

    def _calls(self, results: Sequence[ToolParseResult], raws: Sequence[str]) -> Iterable[ParsedCall]:
        source = f"by {type(self._parser.user_parser).__name__}.parse in the text of the answer"
        decoded, at = DecodedIds(self._parser.markup.decode, self._ids), 0
        for result, raw in zip(results, raws, strict=True):
            found = decoded.text.find(raw, at) if raw else -1
            start, stop = (0, len(self._ids)) if found < 0 else decoded.span_of(found, found + len(raw))
            at = max(at, found + len(raw))
            arguments: Any = result.input
            if result.is_error or not isinstance(arguments, Mapping):
                name = None if result.name == ToolParseResult.UNKNOWN_NAME else result.name
                reason = f"The call cannot be read. It was found {source}."
                yield ParsedCall(CallStatus.MALFORMED, name, None, raw or result.payload, start, stop, reason)
            else:
                reason = f"The call was found {source}, not by token id."
                call_id = result.id if isinstance(result.id, str) else None
                yield ParsedCall(CallStatus.LENIENT, result.name, dict(arguments), raw, start, stop, reason, call_id)


def _parses_text(parser: ToolParser) -> bool:
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


class _Plain(ToolParser):
    def parse(self, text: str) -> list[ToolParseResult]:
        return []


@cache
def _character_parser(name: str) -> CoreToolParser:
    return bound_parser(name, cast(Any, _CharacterTokenizer()))


class _CharacterTokenizer:
    """A vocabulary of single characters. It has no control tokens, so tags are found by their text."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_ids: ClassVar[list[int]] = []

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))
