"""Parser of whole completions: a format of calls and a format of reasoning."""

from __future__ import annotations

from collections.abc import Sequence, Set
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.grammar import CallGrammar, Grammar, after_reasoning, arguments_json, forced_tools
from tito_core.parsing.markup import DecodedIds, Mark, Markup
from tito_core.parsing.parsed import ParsedCall, ParsedTurn
from tito_core.parsing.preview import Preview
from tito_core.parsing.reasoning import THINK, ReasoningTags
from tito_core.parsing.schema import JsonSchema, check_tools
from tito_core.parsing.suspects import SuspectFinder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        function = {"name": "look", "arguments": {"at": ["x", True]}}
        calls = [{"type": "function", "id": "call00000", "function": function}]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        messages: Any = [{"role": "user", "content": "Go."}, answer]
        try:
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # whatever a template raises: it shows no list
            return False
        return "['x', True]" in str(rendered)

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

    def after_open_reasoning(self, answer: Grammar, prompt_tail: Sequence[int]) -> CallGrammar | None:
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


class TurnSession:
    """Parses one completion."""

    def __init__(self, parser: TurnParser, in_reasoning: bool, tools: Tools | None) -> None:
        self._parser = parser
        self._in_reasoning = in_reasoning
        self._tools = tools
        check_tools(tools or {})
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
        return ParsedTurn(reasoning, "".join(texts).strip(), calls, self._closed, late, suspects)

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
