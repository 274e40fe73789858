"""Parser of whole completions: a format of calls and the tags of reasoning.

A `TurnParser` reads a finished completion. While it is sampled, a `Preview` streams its certain part: reasoning and
then text, never a call. The pieces are always a prefix of the parser's final result, so nothing shown is ever taken
back. Calls are not shown, since the token limit may still turn them into text; nor is anything after the first call.
Text that looks like a call without being one is recorded (`SuspectFinder`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tito_core.ledger.errors import TITOError
from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.call_values import after_blank
from tito_core.parsing.completion import Completion, ParsedCall, ParsedTurn, Tools
from tito_core.parsing.grammar import CallGrammar, TagFormat, after_reasoning, arguments_json, forced_tools
from tito_core.parsing.markup import REPLACEMENT, DecodedIds, Mark, Markup
from tito_core.parsing.schema import JsonSchema, check_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Reasoning between two tags.

    Attributes:
        open: Tag that opens a block; the generation prompt may contain it.
        close: Tag that closes it.
        label: Text at the start of a block that is not reasoning (the name of Gemma's channel).
    """

    open: str
    close: str
    label: str = ""

    def text_of(self, block: str) -> str:
        """Return a block's text without its label and the newlines around it."""
        return block.removeprefix(self.label).strip("\n")


THINK = ReasoningTags("<think>", "</think>")
"""Qwen, GLM, DeepSeek, Kimi, MiniMax, Nemotron."""
BRACKET_THINK = ReasoningTags("[THINK]", "[/THINK]")
"""Mistral, since tokenizer version 13 (vLLM 0.32, `parser/mistral.py`)."""
THOUGHT_CHANNEL = ReasoningTags("<|channel>", "<channel|>", "thought\n")
"""Gemma 4 (its chat template of 2026-07-09)."""
LONGCAT_THINK = ReasoningTags("<longcat_think>", "</longcat_think>")
"""LongCat."""
REASONING = {"think": THINK, "bracket_think": BRACKET_THINK, "channel": THOUGHT_CHANNEL, "none": None}
"""The values of the option `reasoning`."""
CACHED_PROMPT_ENDS = 256
"""How many ends of prompts to cache with whether they leave reasoning open; a template writes few."""


class TurnParser:
    """Parser of one family's completions.

    Attributes:
        markup: The tags in the tokenizer's vocabulary.
        calls: The format of calls.
        reasoning: The tags of reasoning; None if the family writes none.
        starts: The tags that begin a call, reasoning or a wrapper.
        stray: The tags that are damage outside a call.
        suspect_finder: Finds text that looks like a call.
        lenient: Whether loose calls run; otherwise they are malformed.
    """

    lenient = False

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, calls: CallFormat, reasoning: ReasoningTags | None = THINK
    ) -> None:
        tags = [*calls.tags, *calls.wrappers, *((reasoning.open, reasoning.close) if reasoning else ())]
        self.markup = Markup(tokenizer, tags, calls.anchors)
        self.calls = calls
        self.reasoning = reasoning
        self.starts = frozenset({*calls.opening, *calls.wrappers, *((reasoning.open,) if reasoning else ())})
        # A tag that is a token was meant as a tag, so outside a call it is damage.
        certain = {tag for tag in calls.tags if self.markup.certain(tag)}
        self.stray = frozenset(certain - self.starts - {reasoning.close if reasoning else ""})
        self.suspect_finder = SuspectFinder(calls.tags)
        self._tokenizer = tokenizer
        self._reasoning_open: dict[tuple[int, ...], bool] = {}  # by the ids of a prompt's end

    def leniently(self) -> TurnParser:
        """Return this parser in lenient mode."""
        parser = copy(self)
        parser.lenient = True
        return parser

    @cached_property
    def template_writes_python(self) -> bool:
        """Whether the chat template writes a list in arguments as Python does, as the first of Qwen3-Coder."""
        return "['x', True]" in shown_call(self._tokenizer)

    def start(self, prompt_tail: Sequence[int] = (), tools: Tools | None = None) -> TurnSession:
        """Start parsing a completion; see `ToolParser.start`."""
        return TurnSession(self, self._in_reasoning(prompt_tail), tools)

    def preview(self, prompt_tail: Sequence[int] = ()) -> Preview:
        """Start previewing a completion; `prompt_tail` as for `start`."""
        return Preview(self, self._in_reasoning(prompt_tail))

    def call_grammar(self, tools: Tools, name: str | None = None, prompt_tail: Sequence[int] = ()) -> CallGrammar:
        """Return the grammar for a forced call; see `ToolParser.call_grammar`."""
        grammar = self.calls.grammar(self.markup, forced_tools(tools, name))
        if self.reasoning is not None and self._in_reasoning(prompt_tail):
            grammar = after_reasoning(self.markup, self.reasoning.close, grammar)
        return CallGrammar.of(grammar, self.markup.controls)

    def answer_grammar(self, schema: JsonSchema, prompt_tail: Sequence[int] = ()) -> CallGrammar | None:
        """Return the grammar for a JSON answer after reasoning that the prompt opened; None if it opened none."""
        return self.after_open_reasoning(arguments_json(schema), prompt_tail)

    def after_open_reasoning(self, answer: TagFormat, prompt_tail: Sequence[int]) -> CallGrammar | None:
        """Return the grammar for an answer after reasoning that the prompt opened; None if it opened none."""
        if self.reasoning is None or not self._in_reasoning(prompt_tail):
            return None
        return CallGrammar.of(after_reasoning(self.markup, self.reasoning.close, answer), self.markup.controls)

    def _in_reasoning(self, prompt_tail: Sequence[int]) -> bool:
        """Return whether reasoning is open at the end of a prompt.

        Only the generation prompt counts, which follows the last special token: earlier messages may spell the tags.
        """
        if self.reasoning is None:
            return False
        header = len(prompt_tail)
        while header and prompt_tail[header - 1] not in self.markup.special:
            header -= 1
        after = tuple(prompt_tail[header:])
        known = self._reasoning_open.get(after)
        if known is None:
            known = self._ends_open(after, self.reasoning)
            if len(self._reasoning_open) >= CACHED_PROMPT_ENDS:
                self._reasoning_open.clear()
            self._reasoning_open[after] = known
        return known

    def _ends_open(self, ids: Sequence[int], reasoning: ReasoningTags) -> bool:
        tail = Completion(self.markup, DecodedIds(self.markup.decode, ids), False)
        is_open, at = False, 0
        while (mark := tail.next_mark(at, {reasoning.close if is_open else reasoning.open})) is not None:
            is_open, at = not is_open, mark.stop
        return is_open


def shown_call(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template makes of a conversation with a call; empty if it raises."""
    function = {"name": "look", "arguments": {"at": ["x", True]}}
    calls = [{"type": "function", "id": "call00000", "function": function}]
    messages: Any = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # whatever a template raises
        return ""


class TurnSession:
    """Parses one completion."""

    def __init__(self, parser: TurnParser, in_reasoning: bool, tools: Tools | None) -> None:
        self._parser = parser
        self._in_reasoning = in_reasoning
        self._tools = check_tools(tools)
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> None:
        """Take the next sampled ids."""
        self._ids += ids

    def finish(self, *, truncated: bool) -> ParsedTurn:
        """Parse everything that was fed."""
        markup = self._parser.markup
        decoded = DecodedIds(markup.decode, without_stop(self._ids, markup.special))
        parser = self._parser
        completion = Completion(
            markup, decoded, truncated, self._tools, parser.lenient, lambda: parser.template_writes_python
        )
        return _Reader(parser, completion).read(self._in_reasoning)


def without_stop(ids: Sequence[int], special: Set[int]) -> Sequence[int]:
    """Return the ids without the stop token and any special tokens before it."""
    end = len(ids)
    while end and ids[end - 1] in special:
        end -= 1
    return ids[:end]


class _Reader:
    """Reads one completion from tag to tag."""

    def __init__(self, parser: TurnParser, completion: Completion) -> None:
        self._calls = parser.calls
        self._reasoning = parser.reasoning
        self._starts = parser.starts | parser.stray
        self._strays = parser.stray
        self._suspect_finder = parser.suspect_finder
        self._completion = completion
        self._blocks: list[str] = []
        self._late: list[str] = []  # blocks of reasoning after text
        self._texts: list[tuple[int, int]] = []  # spans of text; adjacent ones are joined
        self._suspects: list[ParsedCall] = []
        self._has_text = False  # whether any text is not blank
        self._closed = True  # whether the last reasoning was closed
        self._tried_bare = False  # calls without tags can only be the first text of a message
        self._last_calls = 0, 0  # the span of the last calls that were read

    def read(self, in_reasoning: bool) -> ParsedTurn:
        """Split the completion into reasoning, text and calls."""
        completion = self._completion
        at = self._take_reasoning(0) if in_reasoning and self._reasoning else 0
        while self._closed:
            mark = completion.next_mark(at, self._starts)
            at = self._take_text(at, len(completion.text) if mark is None else mark.start)
            if mark is None:
                break
            if mark.start < at:  # calls without tags ended after it
                continue
            if mark.tag in self._calls.opening:
                after = self._calls.read(completion, mark.start, mark.tag)
                at = self._take_text(mark.start, mark.stop) if after is None else after
                self._last_calls = self._last_calls if after is None else (mark.start, after)
            elif mark.tag in self._strays:
                at = self._take_stray(mark)
            elif mark.tag in self._calls.wrappers:
                at = mark.stop
            else:
                at = self._take_reasoning(mark.stop)
        early, late = ("\n".join(filter(None, blocks)) for blocks in (self._blocks, self._late))
        reasoning = "\n".join(filter(None, (early, late)))
        texts = [completion.text[start:stop] for start, stop in self._texts]
        for start, stop in self._texts:
            self._suspects += self._suspect_finder.records(completion, start, stop)
        calls, suspects = tuple(completion.calls), tuple(self._suspects)
        start, stop = self._last_calls
        cut = completion.truncated and 0 < stop == len(completion.text)
        unclosed = completion.unclosed(start, self._calls.pairs) if cut else ()
        return ParsedTurn(reasoning, "".join(texts).strip(), calls, self._closed, late, suspects, unclosed)

    def _take_stray(self, first: Mark) -> int:
        """Report stray tags, up to the next tag that could begin something, as one malformed call."""
        last: Mark | None = first
        stop = first.stop
        while last is not None and last.tag in self._strays:
            stop = last.stop
            last = self._completion.next_mark(stop)
        reason = f"The tag {first.tag} is outside any call."
        rest = self._completion.text[first.start :] if self._completion.truncated else None
        if rest is not None and any(tag.startswith(rest) and tag != rest for tag in self._calls.tags):
            stop = len(self._completion.text)  # the beginning of a longer tag
            self._completion.add_unclosed(first.start, stop, reason)
        else:
            self._completion.add_malformed(first.start, stop, reason)
        return stop

    def _take_text(self, start: int, stop: int) -> int:
        """Take text, or calls without tags; return the character after them."""
        text = self._completion.text[start:stop]
        blank = not text.strip()
        if not self._tried_bare and not self._completion.calls and not blank:
            self._tried_bare = True
            after = self._calls.read_bare(self._completion, start + len(text) - len(text.lstrip()))
            if after is not None:
                self._last_calls = start, after
                return after
        if self._texts and self._texts[-1][1] == start:
            start = self._texts.pop()[0]
        if start < stop:
            self._texts.append((start, stop))
        self._has_text = self._has_text or not blank
        return stop

    def _take_reasoning(self, start: int) -> int:
        """Take reasoning from character `start`; return the character after its closing tag."""
        assert self._reasoning is not None
        close = self._completion.next_mark(start, {self._reasoning.close})
        self._closed = close is not None
        stop = len(self._completion.text) if close is None else close.start
        if close is None and not self._completion.truncated:
            stop = self._take_calls_at_end(start)
        blocks = self._late if self._has_text else self._blocks
        blocks.append(self._reasoning.text_of(self._completion.text[start:stop]))
        return stop if close is None else close.stop

    def _take_calls_at_end(self, start: int) -> int:
        """Read the calls at the end of reasoning that was never closed; return where they begin.

        Such calls are loose, since the policy did not end its reasoning. A call with text after it is a draft.
        """
        assert self._reasoning is not None
        completion, opening = self._completion, self._calls.opening
        begin, first = len(completion.text), len(completion.calls)
        mark = completion.next_mark(start, opening)
        while mark is not None:
            after = self._calls.read(completion, mark.start, mark.tag)
            following = completion.next_mark(mark.stop if after is None else after, opening)
            if after is not None:
                begin = min(begin, mark.start)
                if completion.text[after : len(completion.text) if following is None else following.start].strip():
                    del completion.calls[first:]
                    begin = len(completion.text)
            mark = following
        close = self._reasoning.close
        completion.mark_loose(first, f"The call is inside reasoning that never ended: write {close} before it.")
        reason = "It looks like a call, but is inside reasoning that never ended."
        self._suspects += self._suspect_finder.records(completion, start, begin, reason)
        return begin


_STRUCTURE = "<{[(=>]})"
_KEY = re.compile(r"""["'](?:arguments|parameters)["']?\s*:""")
_BEFORE, _AFTER = frozenset("\"'=[{<>|.:"), frozenset("\"'=[{<>|(")
UNMARKED = "It looks like a call, but lacks the markup of one."


class SuspectFinder:
    """Finds text that looks like a call of one format. Stateless.

    Args:
        tags: The format's tags.
    """

    def __init__(self, tags: Iterable[str]) -> None:
        spelled = sorted(tags, key=len, reverse=True)
        self._tags = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        self._signs = (*_STRUCTURE, *(tag for tag in spelled if set(tag).isdisjoint(_STRUCTURE)))

    def records(self, completion: Completion, start: int, stop: int, reason: str = UNMARKED) -> tuple[ParsedCall, ...]:
        """Return a record of what looks like a call between two characters of a completion, or nothing."""
        found = self.find(completion.text[start:stop], completion.tools)
        if found is None:
            return ()
        first, last, name = found
        return (completion.suspect_record(start + first, start + last, reason, name),)

    def find(self, text: str, tools: Tools) -> tuple[int, int, str | None] | None:
        """Return the span of what looks like a call, as (first, one past last, tool name or None); None for plain text.

        Takes time linear in the text, and in the number of tools only if the text has a call's punctuation or a tag.
        """
        if not any(map(text.__contains__, self._signs)):  # far faster than a regular expression
            return None
        found = [match.span() for match in self._tags.finditer(text)] if self._tags else []
        after_tags = {after_blank(text, stop) for _, stop in found}
        if '"' in text or "'" in text:
            found += [match.span() for match in _KEY.finditer(text)]
        name = None
        for tool in tools:
            places = list(_in_call_form(text, tool, after_tags)) if tool in text else []
            name = name or (tool if places else None)
            found += places
        if not found:
            return None
        return min(start for start, _ in found), max(stop for _, stop in found), name


def _in_call_form(text: str, tool: str, after_tags: Set[int]) -> Iterator[tuple[int, int]]:
    """Yield the spans where a tool's name is a whole word after a tag, or next to a call's punctuation."""
    for match in re.finditer(rf"(?<!\w){re.escape(tool)}(?!\w)", text):
        start, stop = match.span()
        if start in after_tags or text[start - 1 : start] in _BEFORE or text[stop : stop + 1] in _AFTER:
            yield start, stop


_REDECODE_FRACTION = 16
"""With a decoder that must start at the first token, decode again only after 1/16 more tokens."""
Kind = Literal["reasoning", "text"]


class PreviewError(TITOError, ValueError):
    """A parser's preview is not a prefix of its final result. Nothing is committed."""


class Piece(NamedTuple):
    """Text that continues the earlier pieces of its kind."""

    kind: Kind
    text: str


class Preview:
    """Previews one completion of a `TurnParser`.

    Args:
        parser: The parser whose result is previewed.
        in_reasoning: Whether the prompt opened reasoning.
    """

    def __init__(self, parser: TurnParser, in_reasoning: bool) -> None:
        self._parser = parser
        self._markup = parser.markup
        self._beginnings = {tag[:length] for tag in parser.markup.spelled for length in range(1, len(tag))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._ids: list[int] = []
        self._at = 0  # the first character of their text that was not read yet
        self._next = 0  # the number of ids at which to decode again
        self._over = False  # a call has begun
        self._held = False  # nothing more is certain until the reasoning closes
        self._text = _Stripped()
        self._thought = _Reasoning("" if parser.reasoning is None else parser.reasoning.label)
        self._in_block = in_reasoning

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """Take the next sampled ids; return the pieces that are now certain."""
        if self._over:
            return []
        self._ids += ids
        if self._held and not self._may_close(len(ids)):
            return []
        end = len(self._ids)
        while end and self._ids[end - 1] in self._markup.special:
            end -= 1  # it may be the stop token, which is not text
        if end < self._next:
            return []
        decoded = DecodedIds(self._markup.decode, self._ids[:end])
        pieces = [piece for piece in self._read(decoded) if piece.text]
        self._drop_read(decoded)
        return pieces

    def _may_close(self, new: int) -> bool:
        """Return whether the newest ids end the tag that closes reasoning."""
        assert self._parser.reasoning is not None
        close = self._parser.reasoning.close
        return close in self._markup.decode(self._ids[-new - len(close) :])[0]

    def _read(self, decoded: DecodedIds) -> Iterator[Piece]:
        self._held = False
        text = decoded.text.rstrip(REPLACEMENT)  # the next token may complete these bytes
        marks = self._markup.marks(decoded)
        certain = self._certain(text, marks)
        for mark in marks:
            if mark.start >= certain:
                break
            if mark.start < self._at:
                continue
            opens_call = self._in_block and mark.tag in self._parser.calls.opening
            if opens_call and mark.start > self._last_close(marks):
                certain, self._held = mark.start, True  # if the reasoning never ends, this may be a call
                break
            if self._is_boundary(mark):
                yield self._piece(text[self._at : mark.start])
                self._at = mark.stop
                yield self._enter(mark)
            if self._over:
                return
        yield self._piece(text[self._at : certain])
        self._at = max(self._at, certain)

    def _certain(self, text: str, marks: Sequence[Mark]) -> int:
        """Return where a tag may have begun that is not complete yet, else where the text ends."""
        first = max(0, len(text) - self._longest)
        near = [mark for mark in marks[-self._longest :] if mark.stop > first]
        for start in range(first, len(text)):
            if text[start:] in self._beginnings and not any(mark.start < start < mark.stop for mark in near):
                return start
        return len(text)

    def _last_close(self, marks: Sequence[Mark]) -> int:
        """Return the first character of the last tag that closes reasoning, or -1."""
        reasoning = self._parser.reasoning
        return next((mark.start for mark in reversed(marks) if reasoning and mark.tag == reasoning.close), -1)

    def _is_boundary(self, mark: Mark) -> bool:
        if self._in_block:
            assert self._parser.reasoning is not None
            return mark.tag == self._parser.reasoning.close
        return mark.tag in self._parser.starts or mark.tag in self._parser.stray

    def _enter(self, mark: Mark) -> Piece:
        """Enter what a tag begins; return the held end of the reasoning that it closes."""
        if self._in_block:
            self._in_block = False
            return Piece("reasoning", self._thought.end_block())
        reasoning, opening = self._parser.reasoning, self._parser.calls.opening
        if mark.tag in self._parser.calls.wrappers and mark.tag not in opening:
            return Piece("text", "")
        if reasoning is not None and mark.tag == reasoning.open and mark.tag not in opening:
            self._in_block = True
            self._thought.begin_block(late=self._text.begun)
        else:
            self._over = True
        return Piece("text", "")

    def _piece(self, text: str) -> Piece:
        if self._in_block:
            return Piece("reasoning", self._thought.add(text))
        if not self._text.begun and text.strip()[:1] and text.strip()[0] in self._parser.calls.bare:
            self._over = True  # it may be a call without tags
            return Piece("text", "")
        return Piece("text", self._text.add(text))

    def _drop_read(self, decoded: DecodedIds) -> None:
        """Drop the tokens that were read, up to a token that begins with a whole character."""
        begins = getattr(self._markup.decode, "begins", None)
        if begins is None:
            self._next = len(self._ids) + len(self._ids) // _REDECODE_FRACTION
            return
        first = decoded.token_of(self._at)
        while first > 0 and not begins(decoded.ids[first]):
            first -= 1
        if first > 0:
            self._at -= decoded.starts[first]
            del self._ids[:first]


class _Stripped:
    """Strips blanks around a text: trailing blanks are held until something follows them.

    Attributes:
        begun: Whether anything but blanks was added.
    """

    def __init__(self, blanks: str | None = None) -> None:
        self._blanks = blanks
        self._held = ""
        self.begun = False

    def add(self, text: str) -> str:
        """Add text; return what can be shown."""
        text = self._held + text if self.begun else text.lstrip(self._blanks)
        shown = text.rstrip(self._blanks)
        self._held = text[len(shown) :]
        self.begun = self.begun or bool(shown)
        return shown


class _Reasoning:
    """Joins blocks of reasoning by newlines, each as `ReasoningTags.text_of` returns it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._held = ""  # reasoning of only blanks is not shown
        self._shown = self._several = False
        self.begin_block()

    def begin_block(self, *, late: bool = False) -> None:
        """Begin the next block; one after text is a separate block of the message and is not shown."""
        self._late = late
        self._head: str | None = "" if self._label else None  # text that may be the label
        self._block = _Stripped("\n")

    def add(self, text: str) -> str:
        """Add text to the block; return what can be shown."""
        if self._head is not None:
            self._head += text
            if self._label.startswith(self._head) and self._head != self._label:
                return ""
            text, self._head = self._head.removeprefix(self._label), None
        began = self._block.begun
        new = self._block.add(text)
        if self._late or not new:
            return ""
        if not began and self._several:
            new = "\n" + new
        self._several = True
        self._held += new
        if not self._shown and not self._held.strip():
            return ""
        shown, self._held, self._shown = self._held, "", True
        return shown

    def end_block(self) -> str:
        """End the block; return the text that was held because it could have been the label."""
        rest, self._head = self._head, None
        return self.add(rest) if rest else ""
