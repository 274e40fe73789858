"""A parser of whole turns: one format of calls beside one of reasoning."""

from __future__ import annotations

from collections.abc import Sequence, Set
from copy import copy
from typing import TYPE_CHECKING

from tito_core.parsing.call_format import CallFormat
from tito_core.parsing.completion import Completion, JsonSchema, Tools
from tito_core.parsing.grammar import CallGrammar, after_reasoning, arguments_json, chosen
from tito_core.parsing.markup import DecodedIds, Mark, Markup
from tito_core.parsing.parsed import ParsedCall, ParsedTurn
from tito_core.parsing.preview import Preview
from tito_core.parsing.reasoning import THINK, ReasoningTags
from tito_core.parsing.suspects import Suspicion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REMEMBERED = 256
"""Ends of prompts of which it is remembered whether they leave reasoning open; a template writes few."""


class TurnParser:
    """Parser of one family's turns: what a repair would change is malformed, and so is a loose call unless lenient."""

    lenient = False

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, calls: CallFormat, reasoning: ReasoningTags | None = THINK
    ) -> None:
        tags = [*calls.tags, *calls.wrappers, *((reasoning.open, reasoning.close) if reasoning else ())]
        self.markup = Markup(tokenizer, tags, calls.anchors)
        self.calls = calls
        self.reasoning = reasoning
        self.starts = frozenset({*calls.opening, *calls.wrappers, *((reasoning.open,) if reasoning else ())})
        # Of a tag by token it is certain that it was meant as one, so outside any call it is damage.
        certain = {tag for tag in calls.tags if self.markup.certain(tag)}
        self.stray = frozenset(certain - self.starts - {reasoning.close if reasoning else ""})
        self.suspicion = Suspicion(calls.tags)
        self._openings: dict[tuple[int, ...], bool] = {}

    def leniently(self) -> TurnParser:
        """Build a parser that reads loose calls too."""
        parser = copy(self)
        parser.lenient = True
        return parser

    def start(self, prompt_tail: Sequence[int] = (), tools: Tools | None = None) -> TurnSession:
        """Begin a completion; a reasoning block that the generation prompt left open in `prompt_tail` counts."""
        return TurnSession(self, self._opened(prompt_tail), tools)

    def preview(self, prompt_tail: Sequence[int] = ()) -> Preview:
        """Begin to show a completion as it comes; `prompt_tail` as for `start`."""
        return Preview(self, self._opened(prompt_tail))

    def call_grammar(self, tools: Tools, name: str | None = None, prompt_tail: Sequence[int] = ()) -> CallGrammar:
        """Return the grammar for a forced call: of the tool `name`, or of any; see `ToolParser`."""
        grammar = self.calls.grammar(self.markup, chosen(tools, name))
        if self.reasoning is not None and self._opened(prompt_tail):
            grammar = after_reasoning(self.markup, self.reasoning.close, grammar)
        return CallGrammar.of(grammar, self.markup.controls)

    def answer_grammar(self, schema: JsonSchema, prompt_tail: Sequence[int] = ()) -> CallGrammar | None:
        """Return the grammar for a bare JSON answer after reasoning that the prompt opened; None if it opened none."""
        if self.reasoning is None or not self._opened(prompt_tail):
            return None
        grammar = after_reasoning(self.markup, self.reasoning.close, arguments_json(schema))
        return CallGrammar.of(grammar, self.markup.controls)

    def _opened(self, prompt_tail: Sequence[int]) -> bool:
        """Return whether reasoning is open at the end of a prompt.

        The generation prompt follows the last special token. What comes before it is other messages, which say
        nothing of this one, whatever they spell.
        """
        if self.reasoning is None:
            return False
        header = len(prompt_tail)
        while header and prompt_tail[header - 1] not in self.markup.special:
            header -= 1
        after = tuple(prompt_tail[header:])
        known = self._openings.get(after)
        if known is None:
            known = self._reads_open(after, self.reasoning)
            if len(self._openings) >= REMEMBERED:
                self._openings.clear()
            self._openings[after] = known
        return known

    def _reads_open(self, ids: Sequence[int], reasoning: ReasoningTags) -> bool:
        tail = Completion(self.markup, DecodedIds(self.markup.decode, ids), False)
        opened, at = False, 0
        while (mark := tail.next(at, {reasoning.close if opened else reasoning.open})) is not None:
            opened, at = not opened, mark.stop
        return opened


class TurnSession:
    """Parses one completion."""

    def __init__(self, parser: TurnParser, in_reasoning: bool, tools: Tools | None) -> None:
        self._parser = parser
        self._in_reasoning = in_reasoning
        self._tools = tools
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> None:
        """Take the next sampled ids."""
        self._ids += ids

    def finish(self, *, truncated: bool) -> ParsedTurn:
        """Parse everything that was fed."""
        markup = self._parser.markup
        decoded = DecodedIds(markup.decode, without_stop(self._ids, markup.special))
        said = Completion(markup, decoded, truncated, self._tools, self._parser.lenient)
        return _Reader(self._parser, said).read(self._in_reasoning)


def without_stop(ids: Sequence[int], special: Set[int]) -> Sequence[int]:
    """Leave out the stop token, which is no text, and whatever special tokens come before it."""
    end = len(ids)
    while end and ids[end - 1] in special:
        end -= 1
    return ids[:end]


class _Reader:
    """Walks once through a completion, from tag to tag."""

    def __init__(self, parser: TurnParser, said: Completion) -> None:
        self._calls = parser.calls
        self._reasoning = parser.reasoning
        self._starts = parser.starts | parser.stray
        self._strays = parser.stray
        self._suspicion = parser.suspicion
        self._said = said
        self._blocks: list[str] = []
        self._late: list[str] = []  # those after text
        self._texts: list[tuple[int, int]] = []  # where there is text; what follows on is one
        self._suspects: list[ParsedCall] = []
        self._talked = False  # whether any of the texts is more than blank
        self._closed = True
        self._spoken = False  # calls without a tag are the message, so nothing is said before them

    def read(self, in_reasoning: bool) -> ParsedTurn:
        """Sort the whole completion into reasoning, text and calls."""
        said = self._said
        at = self._block(0) if in_reasoning and self._reasoning else 0
        while self._closed:
            mark = said.next(at, self._starts)
            at = self._text(at, len(said.text) if mark is None else mark.start)
            if mark is None:
                break
            if mark.start < at:  # calls without a tag went past it
                continue
            if mark.tag in self._calls.opening:
                after = self._calls.read(said, mark.start, mark.tag)
                at = self._text(mark.start, mark.stop) if after is None else after
            elif mark.tag in self._strays:
                at = self._stray(mark)
            elif mark.tag in self._calls.wrappers:
                at = mark.stop
            else:
                at = self._block(mark.stop)
        early, late = ("\n".join(filter(None, blocks)) for blocks in (self._blocks, self._late))
        reasoning = "\n".join(filter(None, (early, late)))
        texts = [said.text[start:stop] for start, stop in self._texts]
        for start, stop in self._texts:
            self._suspects += self._suspicion.of(said, start, stop)
        calls, suspects = tuple(said.calls), tuple(self._suspects)
        return ParsedTurn(reasoning, "".join(texts).strip(), calls, self._closed, late, suspects)

    def _stray(self, first: Mark) -> int:
        """Report tags that stand outside any call, up to the next that could begin something, as one malformed call."""
        last: Mark | None = first
        stop = first.stop
        while last is not None and last.tag in self._strays:
            stop = last.stop
            last = self._said.next(stop)
        reason = f"The tag {first.tag} stands outside any call."
        rest = self._said.text[first.start :] if self._said.truncated else None
        if rest is not None and any(tag.startswith(rest) and tag != rest for tag in self._calls.tags):
            stop = len(self._said.text)  # the beginning of a longer tag
            self._said.unclosed(first.start, stop, reason)
        else:
            self._said.malformed(first.start, stop, reason)
        return stop

    def _text(self, start: int, stop: int) -> int:
        """Take text, or the calls that it is; return the character after them."""
        text = self._said.text[start:stop]
        blank = not text.strip()
        if not self._spoken and not self._said.calls and not blank:
            self._spoken = True
            after = self._calls.read_bare(self._said, start + len(text) - len(text.lstrip()))
            if after is not None:
                return after
        if self._texts and self._texts[-1][1] == start:
            start = self._texts.pop()[0]
        if start < stop:
            self._texts.append((start, stop))
        self._talked = self._talked or not blank
        return stop

    def _block(self, start: int) -> int:
        """Read reasoning from character `start`; return the character after its closing tag."""
        assert self._reasoning is not None
        close = self._said.next(start, {self._reasoning.close})
        self._closed = close is not None
        stop = len(self._said.text) if close is None else close.start
        if close is None and not self._said.truncated:
            stop = self._ending(start)
        blocks = self._late if self._talked else self._blocks
        blocks.append(self._reasoning.text_of(self._said.text[start:stop]))
        return stop if close is None else close.stop

    def _ending(self, start: int) -> int:
        """Read the calls that reasoning without an end ends in; return where they begin.

        Such calls are loose, since nothing says that the policy was done with reasoning. Calls with words after them
        are drafts.
        """
        assert self._reasoning is not None
        said, opening = self._said, self._calls.opening
        begun, first = len(said.text), len(said.calls)
        mark = said.next(start, opening)
        while mark is not None:
            after = self._calls.read(said, mark.start, mark.tag)
            following = said.next(mark.stop if after is None else after, opening)
            if after is not None:
                begun = min(begun, mark.start)
                if said.text[after : len(said.text) if following is None else following.start].strip():
                    del said.calls[first:]
                    begun = len(said.text)
            mark = following
        said.loosen(first, f"The call stands in reasoning that never ended: {self._reasoning.close} comes before it.")
        reason = "It looks like a call, but stands in reasoning that never ended."
        self._suspects += self._suspicion.of(said, start, begun, reason)
        return begun
