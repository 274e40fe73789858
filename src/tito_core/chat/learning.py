"""Learning how a template ends its turns, from its own renderings of a turn with and without a message after it.

Most families write a closer (`<|im_end|>`), some several tokens (Cohere: `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`),
some none: in GLM's and Gemma 4's the token that opens the next message ends a turn of calls. gpt-oss ends a call, an
answer, and the last answer of a conversation with three different tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tito_core.chat.cutting import adjacent, content_spans, controls_from, cut, run_before
from tito_core.chat.encoder import ContentSafeEncoder, Control
from tito_core.chat.ending import Ending, Opened
from tito_core.chat.traced import Traced
from tito_core.ledger.columns import TokenIds

THOUGHT = "Hm"
"""Text of the probe's reasoning."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn in two renderings.

    Attributes:
        alone: The conversation up to the turn, without generation prompt.
        followed: The same with another message and the generation prompt. The template may write what comes before
            the turn's content in another way (Qwen3: an empty reasoning block), and may quote the content later.
        source: Trace source of the turn's message.
    """

    encoder: ContentSafeEncoder
    alone: Traced
    followed: Traced
    source: int

    def ends(self) -> tuple[int, int] | None:
        """Give where the turn's content ends in both; None where they do not show the same."""
        here = content_spans(self.alone, self.source)
        there = content_spans(self.followed, self.source)[: len(here)]
        same = [str.__str__(cut(self.alone, a, b)) for a, b, _ in here]
        if not here or same != [str.__str__(cut(self.followed, a, b)) for a, b, _ in there]:
            return None
        return here[-1][1], there[-1][1]

    def controls(self) -> tuple[list[Control], list[Control], int, int] | None:
        """List the control tokens after the turn's content in both, count those in which they agree, and give where
        the content ends when another message follows.
        """
        ends = self.ends()
        if ends is None:
            return None
        here, there = (
            controls_from(self.encoder, t, e) for t, e in zip((self.alone, self.followed), ends, strict=True)
        )
        moved = ends[1] - ends[0]
        same = [(a + moved, b + moved, token) == other for (a, b, token), other in zip(here, there, strict=False)]
        return (here, there, [*same, False].index(False), ends[1]) if there else None


def learn_answers(sample: Sample, thoughts: Sequence[Traced]) -> Ending | None:
    """Learn how answers end, or give None where no control token ends them.

    Args:
        sample: An answer of text.
        thoughts: What holds reasoning, with nothing after it: an answer without text, and calls.
    """
    found = sample.controls()
    if found is None:
        return None
    here, there, same, end = found
    closing = adjacent(there[:same])
    finals: frozenset[int] = frozenset()
    if not closing and here:
        closing, finals = (there[0][2],), frozenset({here[-1][2]})
    openers = frozenset() if closing else frozenset({there[0][2]})
    stop = there[len(closing) - 1][1] if closing else there[0][0]
    closers = {Opened.MESSAGE: _ids(sample.encoder, sample.followed, end, stop)}
    ending = Ending(closing, finals, openers, closers)
    for thought in thoughts:
        closed = _reasoning(sample, thought, ending)
        if closed is not None:
            return Ending(closing, finals, openers, {**closers, Opened.REASONING: closed})
    return ending


def learn_calls(sample: Sample, answers: Ending) -> Ending | None:
    """Learn how turns of calls end, given how answers end: it tells a call's own markup from a closer."""
    found = sample.controls()
    if found is None:
        return None
    here, there, same, end = found
    common = tuple(token for _, _, token in there[:same])
    finals: frozenset[int] = frozenset()
    closing: tuple[int, ...] = ()
    if not answers.closing:
        if same == len(there):
            return None
        start = stop = there[same][0]
    elif common and common[-len(answers.closing) :] == answers.closing:
        closing, finals = answers.closing, answers.finals
        start, stop = there[same - len(closing)][0], there[same - 1][1]
    else:
        last = max(same - 1, 0)
        closing = (there[last][2],)
        start, stop = there[last][:2]
        finals = frozenset({here[-1][2]} if here and not same else ())
    openers = answers.openers if closing else answers.openers | {there[same][2]}
    text = sample.followed
    plain = str.__str__(text)
    markup = run_before(there, text, end, start)
    closers = {
        Opened.MESSAGE: _ids(sample.encoder, text, end + len(plain[end:start].rstrip()), stop),
        Opened.CALL: _ids(sample.encoder, text, markup, stop),
    }
    return Ending(closing, finals, openers, closers)


def share_closers(answers: Ending, calls: Ending) -> tuple[Ending, Ending]:
    """Let either kind close what the other can: a call cut off is an answer to Strands, and openers end both."""
    openers = answers.openers | calls.openers
    call = calls.closers[Opened.CALL]
    if calls.closing[-1:] != answers.closing[-1:]:
        call = np.concatenate([call[: len(call) - len(calls.closing)], np.array(answers.closing, np.int32)])
    answers = Ending(answers.closing, answers.finals, openers, {**answers.closers, Opened.CALL: call})
    calls = Ending(calls.closing, calls.finals, openers, {**answers.closers, **calls.closers})
    return answers, calls


def _reasoning(sample: Sample, thought: Traced, ending: Ending) -> TokenIds | None:
    """Give what the template writes from the end of reasoning to the end of an answer without text.

    Where it shows reasoning before calls only, the reasoning's own closer comes from there.
    """
    spans = content_spans(thought, sample.source)
    if not spans or str.__str__(cut(thought, *spans[0][:2])) != THOUGHT:
        return None
    end, controls = spans[0][1], controls_from(sample.encoder, thought, spans[0][1])
    closing = np.array(ending.closing, np.int32)
    if len(spans) > 1:
        return np.concatenate([_ids(sample.encoder, thought, end, controls[0][1] if controls else end), closing])
    finals = [control for control in controls if control[2] in ending.finals]
    if finals:
        return np.concatenate([_ids(sample.encoder, thought, end, finals[-1][0]), closing])
    closings = [control for control in controls if control[2] in ending.closing[-1:]]
    return _ids(sample.encoder, thought, end, closings[-1][1] if closings else len(str.__str__(thought).rstrip()))


def _ids(encoder: ContentSafeEncoder, text: Traced, start: int, stop: int) -> TokenIds:
    return encoder.encode(cut(text, start, stop)).ids


def stops_of(endings: Sequence[Ending]) -> tuple[int, ...]:
    """Give all ids at which an engine must stop, the usual one first."""
    first = endings[0].closing[-1:]
    rest = sorted(frozenset().union(*(ending.stops for ending in endings)) - set(first))
    return (*first, *rest)
