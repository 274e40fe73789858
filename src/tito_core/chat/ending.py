"""How a turn ends: its closing tokens, which of them a sampled turn lacks, and where they are in rendered text.

They are learned from renderings of a turn with and without a message after it. In GLM and Gemma 4, the token that opens
the next message ends a turn of calls. gpt-oss ends a call, an answer, and the last answer of a conversation with three
different tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from tito_core.chat.encoder import ContentSafeEncoder, Control
from tito_core.chat.traced import Span, Traced
from tito_core.ledger.columns import TokenIds


class Opened(StrEnum):
    """The part that a truncated turn left open; its closing tokens are inserted before the next message."""

    MESSAGE = "message"
    REASONING = "reasoning"
    CALL = "call"


class OpenTags(NamedTuple):
    """What a cut-off call left open.

    Attributes:
        closers: The tags that close it, innermost first.
        text: The end of the sampled text; it may have begun the first of them, or the blanks before it.
    """

    closers: Sequence[str]
    text: str


_TAG = re.compile(r"<(/?)([\w:.-]+)")


def spelled_tags(text: str, shown: str) -> OpenTags:
    """Return what a cut-off call in a text left open, of the tags `<x>` whose `</x>` the template writes in a call."""
    opened: list[str] = []
    for slash, name in _TAG.findall(text):
        if name in opened and slash:
            del opened[len(opened) - 1 - opened[::-1].index(name) :]
        elif not slash and f"</{name}>" in shown:
            opened.append(name)
    return OpenTags([f"</{name}>" for name in reversed(opened)], text)


@dataclass(frozen=True, slots=True)
class Ending:
    """How turns of one kind (answers or calls) end.

    Attributes:
        closing: Ids of the control tokens between the turn and the next message's opener: one in most families, two
            in Cohere's, none where the next opener ends the turn (GLM).
        finals: Ids that end the last turn of a conversation, if they differ from `closing` (gpt-oss).
        openers: Ids that open the next message, if nothing else ends a turn.
        closers: Ids to append to a truncated turn, by the part it left open; each ends with `closing`.
    """

    closing: tuple[int, ...]
    finals: frozenset[int]
    openers: frozenset[int]
    closers: Mapping[Opened, TokenIds]

    def missing(self, last_output_id: int | None, opened: Opened, controls: Set[int] = frozenset()) -> TokenIds:
        """Return the ids to insert after a turn; none if it is closed.

        Args:
            last_output_id: The last token that the engine sampled.
            opened: What the turn left open.
            controls: Ids of control tokens. A call's closer that was sampled last is not inserted again.
        """
        closers = self.closers.get(opened, self.closers[Opened.MESSAGE])
        if last_output_id in self.finals:
            return closers[:0]
        if last_output_id in self.closing:
            return closers[len(closers) - len(self.closing) + self.closing.index(last_output_id) + 1 :]
        call = self.closers.get(Opened.CALL, closers).tolist()
        if opened != Opened.REASONING and last_output_id in controls and last_output_id in call:
            return self.closers[Opened.CALL][call.index(last_output_id) + 1 :]
        return closers

    @property
    def stops(self) -> frozenset[int]:
        """Return the stop token ids for the engine."""
        return frozenset(self.closing[-1:]) | self.finals | self.openers


def content_start(text: Traced, source: int) -> int:
    """Return where the content of message `source` begins, or the length of the text if it is not shown."""
    return next((start for start, _, origin in text.spans if origin == source), len(text))


def content_spans(text: Traced, source: int) -> list[Span]:
    """List the spans of message `source`."""
    return [span for span in text.spans if span[2] == source]


def controls_from(encoder: ContentSafeEncoder, text: Traced, start: int) -> list[Control]:
    """List the scaffold's control tokens from a position on."""
    return [control for control in encoder.controls(text) if control[0] >= start]


def find_run(controls: Sequence[Control], ids: Sequence[int], start: int) -> tuple[int, int] | None:
    """Return the (start, stop) characters of the first run of control tokens `ids` at or after `start`, or None."""
    last = len(ids) - 1
    for i in range(len(controls) - last):
        if controls[i][0] >= start and all(controls[i + j][2] == token for j, token in enumerate(ids)):
            return controls[i][0], controls[i + last][1]
    return None


def run_before(controls: Sequence[Control], text: Traced, start: int, stop: int) -> int:
    """Return where the run of control tokens that ends at `stop` begins, with the blanks between and before them."""
    plain = str.__str__(text)
    at = stop
    for begin, end, _ in reversed([control for control in controls if start <= control[0] and control[1] <= stop]):
        if plain[end:at].strip():
            break
        at = begin
    return at if at == stop else start + len(plain[start:at].rstrip())


def adjacent(controls: Sequence[Control]) -> tuple[int, ...]:
    """Return the ids of the leading control tokens that have no text between them."""
    ids: list[int] = []
    for i, (start, _, token) in enumerate(controls):
        if i and start != controls[i - 1][1]:
            break
        ids.append(token)
    return tuple(ids)


def cut(text: Traced, start: int, stop: int | None = None) -> Traced:
    """Return `text[start:stop]` with its content spans."""
    piece = text[start:stop]
    return piece if isinstance(piece, Traced) else Traced.of(piece, ())


THOUGHT = "Hm"
"""Reasoning text of the probes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn in two renderings.

    Attributes:
        alone: The conversation up to and including the turn, without the generation prompt.
        followed: The same with another message and the generation prompt. Text before the turn's content may differ
            from `alone` (Qwen3: an empty reasoning block), and the content may be quoted again later.
        source: Trace source of the turn's message.
    """

    encoder: ContentSafeEncoder
    alone: Traced
    followed: Traced
    source: int

    def ends(self) -> tuple[int, int] | None:
        """Return where the turn's content ends in both renderings; None if they show different content."""
        here = content_spans(self.alone, self.source)
        there = content_spans(self.followed, self.source)[: len(here)]
        same = [str.__str__(cut(self.alone, a, b)) for a, b, _ in here]
        if not here or same != [str.__str__(cut(self.followed, a, b)) for a, b, _ in there]:
            return None
        return here[-1][1], there[-1][1]

    def controls(self) -> tuple[list[Control], list[Control], int, int] | None:
        """Return the control tokens after the turn's content in both renderings.

        Returns:
            Those of `alone`, those of `followed`, how many leading ones agree, and where the content ends in
            `followed`; None if the renderings show different content or nothing follows it.
        """
        ends = self.ends()
        if ends is None:
            return None
        here, there = (
            controls_from(self.encoder, t, e) for t, e in zip((self.alone, self.followed), ends, strict=True)
        )
        # Compare ids only: some templates change the blanks between them when a message follows.
        same = [one[2] == other[2] for one, other in zip(here, there, strict=False)]
        return (here, there, [*same, False].index(False), ends[1]) if there else None

    def openers(self) -> frozenset[int]:
        """Return the ids before the first text of the rendering; no turn ends with one of them.

        A template that ignores `add_generation_prompt` also writes the next opener after the last turn.
        """
        controls = self.encoder.controls(self.followed)
        question_end = max((stop for _, stop, source in self.followed.spans if source == self.source - 1), default=0)
        closer = next(
            (token for start, _, token in controls if start >= question_end), None
        )  # an empty first message ends with it
        return frozenset(adjacent(controls)) - {closer}

    def follows(self, end: int, text: Traced | None = None) -> int:
        """Return where the next message's content begins, or the length of the text if it shows none."""
        text = self.followed if text is None else text
        return min((a for a, _, source in text.spans if source > self.source and a >= end), default=len(text))


def learn_answers(sample: Sample, thoughts: Sequence[Traced], inner: Set[int] = frozenset()) -> Ending | None:
    """Learn how answers end, or return None if no control token ends them.

    Args:
        sample: An answer with text.
        thoughts: Renderings with reasoning: of an answer without text, followed and not, and of calls.
        inner: Ids that also occur within turns; see `inner_controls`.
    """
    found = sample.controls()
    if found is None:
        return None
    here, there, same, end = found
    closing, stop = _closing(there[:same], sample.openers(), inner)
    finals: frozenset[int] = frozenset()
    if not closing and here:
        closing, finals = (there[0][2],), frozenset({here[-1][2]})
        stop = there[0][1]
    openers = frozenset() if closing else frozenset({there[0][2]})
    stop = stop if closing else there[0][0]
    closers = {Opened.MESSAGE: _ids(sample.encoder, sample.followed, end, stop)}
    ending = Ending(closing, finals, openers, closers)
    for thought in thoughts:
        closed = _reasoning(sample, thought, ending)
        if closed is not None:
            return Ending(closing, finals, openers, {**closers, Opened.REASONING: closed})
    return ending


def _closing(controls: Sequence[Control], openers: Set[int], inner: Set[int]) -> tuple[tuple[int, ...], int]:
    """Return the ids that close an answer and where they end in the text.

    The last control token before the next opener closes the answer at its first occurrence, with those right before it
    (Command R writes two). Tokens that also occur within turns close parts of them (Kimi K3), unless all do.
    """
    tokens = _before_openers(tuple(token for _, _, token in controls), openers)
    ends = [token for token in tokens if token not in inner]
    if not ends:
        row = _before_openers(adjacent(controls), openers)
        return row, controls[len(row) - 1][1] if row else 0
    begin = end = tokens.index(ends[-1])
    while begin and controls[begin - 1][1] == controls[begin][0] and tokens[begin - 1] not in inner:
        begin -= 1
    return tokens[begin : end + 1], controls[end][1]


def _before_openers(closing: tuple[int, ...], openers: Set[int]) -> tuple[int, ...]:
    """Cut a run of closers at the next message's opener; the first closer may also be an opener (Llama 2's BOS)."""
    opener = next((i for i, token in enumerate(closing) if i and token in openers), len(closing))
    return closing[:opener]


def learn_calls(sample: Sample, answers: Ending) -> Ending | None:
    """Learn how turns of calls end; `answers` distinguishes a call's markup from a closer."""
    found = sample.controls()
    if found is None:
        return None
    there, end = found[1], found[3]
    closing, finals, openers, span = _calls_end(sample, found, answers)
    if span is None:
        return None
    start, stop = span
    text = sample.followed
    plain = str.__str__(text)
    markup = run_before(there, text, end, start)
    closers = {
        Opened.MESSAGE: _ids(sample.encoder, text, end + len(plain[end:start].rstrip()), stop),
        Opened.CALL: _ids(sample.encoder, text, markup, stop),
    }
    return Ending(closing, finals, openers, closers)


_CallsEnd = tuple[tuple[int, ...], frozenset[int], frozenset[int], tuple[int, int] | None]


def _calls_end(sample: Sample, found: tuple[list[Control], list[Control], int, int], answers: Ending) -> _CallsEnd:
    """Return the closing, finals and openers of turns of calls, and where the closing is when results follow."""
    here, there, same, end = found
    none: frozenset[int] = frozenset()
    common = tuple(token for _, _, token in there[:same])
    length = len(answers.closing)
    # The first occurrence, because the engine stops there.
    at = next((i for i in range(same - length + 1) if common[i : i + length] == answers.closing), None)
    before = [control for control in there if control[0] < sample.follows(end)]
    if not before:  # the result begins before any token that could end the call
        return (), none, none, None
    if answers.closing and at is not None and at < len(before):
        return answers.closing, answers.finals, answers.openers, (there[at][0], there[at + length - 1][1])
    ended = next((i for i in range(min(same, len(before))) if common[i] in answers.openers), None)
    if ended is not None:  # ends answers only if a message follows, and calls always (Hunyuan 3)
        return (common[ended],), none, answers.openers, there[ended][:2]
    if not answers.closing and same < len(before):
        opener = there[same]
        return (), none, answers.openers | {opener[2]}, (opener[0], opener[0])
    last = before[max(len(_before_openers(common[: len(before)], sample.openers())) - 1, 0)]
    if last[2] in sample.openers() and last == before[0]:  # only the next message's opener ends the call (Command R+)
        return (), none, answers.openers | {last[2]}, (last[0], last[0])
    return (last[2],), frozenset({here[-1][2]} if here and not same else ()), answers.openers, last[:2]


def inner_controls(encoder: ContentSafeEncoder, turns: Sequence[tuple[Traced, int]]) -> frozenset[int]:
    """Return the ids of control tokens within turns of several parts; they end a part, not the turn.

    Args:
        encoder: The encoder that lists control tokens.
        turns: Renderings of a conversation that ends with such a turn, each with the turn's trace source.
    """
    inside: set[int] = set()
    for text, source in turns:
        spans = content_spans(text, source)
        controls = controls_from(encoder, text, spans[0][0] if spans else len(text))
        inside.update(token for _, stop, token in controls if stop <= spans[-1][0])
    return frozenset(inside)


def share_closers(answers: Ending, calls: Ending) -> tuple[Ending, Ending]:
    """Return both, each with the other's closers and openers: Strands stores a truncated call as an answer."""
    openers = answers.openers | calls.openers
    call = calls.closers[Opened.CALL]
    if calls.closing[-1:] != answers.closing[-1:]:
        call = np.concatenate([call[: len(call) - len(calls.closing)], np.array(answers.closing, np.int32)])
    answers = Ending(answers.closing, answers.finals, openers, {**answers.closers, Opened.CALL: call})
    calls = Ending(calls.closing, calls.finals, openers, {**answers.closers, **calls.closers})
    return answers, calls


def _reasoning(sample: Sample, thought: Traced, ending: Ending) -> TokenIds | None:
    """Return the ids from the end of reasoning to the end of an answer without text; None if not shown.

    If the template shows reasoning only before calls, the reasoning's closer is taken from there.
    """
    spans = content_spans(thought, sample.source)
    if not spans or str.__str__(cut(thought, *spans[0][:2])) != THOUGHT:
        return None
    end, until = spans[0][1], sample.follows(spans[0][1], thought)
    controls = [control for control in controls_from(sample.encoder, thought, end) if control[0] < until]
    if until < len(thought) and not ending.closing:
        return None  # the reasoning's closer is ambiguous with the next message's opener
    closing = np.array(ending.closing, np.int32)
    if len(spans) > 1:
        return np.concatenate([_ids(sample.encoder, thought, end, controls[0][1] if controls else end), closing])
    finals = [control for control in controls if control[2] in ending.finals]
    if finals:
        return np.concatenate([_ids(sample.encoder, thought, end, finals[-1][0]), closing])
    closings = [control for control in controls if control[2] in ending.closing[-1:]]
    if until < len(thought) and not closings:
        return None
    return _ids(sample.encoder, thought, end, closings[-1][1] if closings else len(str.__str__(thought).rstrip()))


def _ids(encoder: ContentSafeEncoder, text: Traced, start: int, stop: int) -> TokenIds:
    return encoder.encode(cut(text, start, stop)).ids


def stops_of(endings: Sequence[Ending], inner: frozenset[int]) -> tuple[int, ...]:
    """Return all stop token ids for the engine, the usual one first.

    Args:
        endings: How answers end, and calls.
        inner: Ids that also close a part of a turn, so they end no turn (gpt-oss: `<|end|>` after each analysis).
    """
    stops = frozenset().union(*(ending.stops for ending in endings)) - inner
    usual = [token for token in (*endings[0].closing[-1:], *sorted(endings[0].finals)) if token in stops][:1]
    return (*usual, *sorted(stops - set(usual)))
