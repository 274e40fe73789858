"""Compare a certified template with transformers' plain rendering of whole conversations (law 7).

Of `tito_core.chat` it uses only public results (`first_prompt`, `delta`, `stop_ids`, `certificate`) and `Opened`. It
has its own messages, renderings, ids, stops and expected deltas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from support.plain_template import Ended, Plain, ended
from support.random_chats import Chat, Reply, Writer, strands_answer, strands_reply
from tito_core.chat.ending import Opened
from tito_core.chat.template import ChatTemplate, TemplateError

REPRS = re.compile(r"<bound method|Undefined|Traced|Opaque|<function |<jinja2|object at 0x|<generator")
SHOWN = 60
"""Characters shown on each side of a difference."""


@dataclass(frozen=True)
class Difference:
    """A turn that differs from the plain rendering."""

    what: str
    seed: str
    turn: int
    expected: str
    found: str

    def __str__(self) -> str:
        pair = zip(self.expected, self.found, strict=False)
        at = next((i for i, (a, b) in enumerate(pair) if a != b), min(len(self.expected), len(self.found)))
        window = slice(max(0, at - SHOWN), at + SHOWN)
        return (
            f"{self.what} (conversation {self.seed!r}, turn {self.turn}), at character {at}: "
            f"plain {self.expected[window]!r}, ours {self.found[window]!r}"
        )


@dataclass
class Verdict:
    """Counts of compared turns, and the differences.

    Attributes:
        whole: Turns after which all ids were compared with those of the whole rendering.
        tails: Turns whose delta was compared with the end of the rendering.
        refused: Turns that the certified template refused.
        skipped: Turns that transformers refuses, or whose answer is not shown.
    """

    conversations: int = 0
    whole: int = 0
    tails: int = 0
    refused: int = 0
    skipped: int = 0
    differences: list[Difference] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def judge(
    template: ChatTemplate, tokenizer: Any, seeds: Iterator[str], most: int = 6, words: Sequence[str] = ()
) -> Verdict:
    """Play conversations until `most` differences, with the clock frozen at the time of the template.

    `words` are put into some of their texts. A template may leave them out of its rendering.
    """
    rendering = getattr(template, "rendering", None)
    clock = datetime if rendering is None else SimpleNamespace(now=lambda: rendering.now)
    with patch("transformers.utils.chat_template_utils.datetime", clock):  # Hunyuan writes seconds
        return _judged(template, tokenizer, seeds, most, words)


def _judged(template: ChatTemplate, tokenizer: Any, seeds: Iterator[str], most: int, words: Sequence[str]) -> Verdict:
    plain, verdict = Plain(tokenizer), Verdict()
    if plain.reading is None:
        verdict.differences.append(Difference("the plain rendering shows no question", "", 0, "", ""))
        return verdict
    if plain.reading.tools and not template.certificate.tools:
        what = "the certificate covers no tools, and the plain rendering shows calls and results"
        verdict.differences.append(Difference(what, "", 0, "", ""))
    if not template.certificate.tools:
        plain.reading = replace(plain.reading, tools=False)
    stops: set[tuple[str, bool]] = set()
    for seed in seeds:
        random = Random(seed)
        chat = Writer(random, plain.reading, words=words).chat(random.randint(1, 5))
        verdict.conversations += 1
        verdict.differences += _Played(template, plain, chat, seed, verdict, stops, words).differences()
        if len(verdict.differences) >= most:
            return verdict
    ours = {tokenizer.convert_ids_to_tokens(stop) for stop in template.stop_ids}
    kinds = 2 if template.certificate.tools else 1
    seen = {stop for stop, _ in stops}
    if seen - ours or (len({calls for _, calls in stops}) == kinds and ours - seen):
        verdict.differences.append(Difference("the stop tokens", "", 0, repr(sorted(seen)), repr(sorted(ours))))
    return verdict


@dataclass
class _Played:
    template: ChatTemplate
    plain: Plain
    chat: Chat
    seed: str
    verdict: Verdict
    stops: set[tuple[str, bool]]
    words: Sequence[str]

    def differences(self) -> list[Difference]:
        """Play a conversation until its first difference."""
        chat, plain = self.chat, self.plain
        try:
            text = plain.of(chat, 0)
        except Exception:  # the template refuses the conversation
            self.verdict.skipped += len(chat.turns)
            return []
        try:
            first = self.template.first_prompt(chat.strands(0), chat.system or None, chat.strands_tools() or None)
        except TemplateError as error:
            self.verdict.refused += len(chat.turns)
            self.verdict.refusals.append(str(error))
            return []
        ids = first.ids.tolist()
        if ids != plain.ids(text):
            return [Difference("the first prompt", self.seed, 0, text, plain.decoded(ids))]
        for number in range(len(chat.turns)):
            found = self._turn(number, text, ids)
            if isinstance(found, Difference):
                return [found]
            text, ids = found
        return self._first_prompts()

    def _first_prompts(self) -> list[Difference]:
        """Compare the first prompt of the whole conversation, as in a new branch."""
        number = len(self.chat.turns)
        try:
            text = self.plain.of(self.chat, number)
            tools = self.chat.strands_tools() or None
            found = self.template.first_prompt(self.chat.strands(number), self.chat.system or None, tools).ids.tolist()
        except Exception:  # the template refuses it
            return []
        if found == self.plain.ids(text):
            return []
        return [Difference("the first prompt of a branch", self.seed, number, text, self.plain.decoded(found))]

    def _turn(self, number: int, text: str, ids: list[int]) -> Difference | tuple[str, list[int]]:
        chat, plain = self.chat, self.plain
        answer, reply = chat.turns[number]
        try:
            prompt, alone = plain.of(chat, number), plain.of(chat, number, answer)
            whole = plain.of(chat, number + 1)
        except Exception:  # the template refuses the turn
            self.verdict.skipped += 1
            return "", []
        how = ended(plain, answer, alone, self._shown(number) if () in reply.results else whole)
        stop = None if answer.cut or how is None else plain.ids(how.stop)[-1]
        opened = Opened.REASONING if answer.cut == "thought" else Opened.MESSAGE
        try:
            delta = self.template.delta(
                strands_answer(answer, number), [strands_reply(reply, number)], stop,
                opened=opened, tool_specs=chat.strands_tools(), history=chat.strands(number),
                system_prompt=chat.system or None,
            ).ids.tolist()  # fmt: skip
        except TemplateError as error:
            self.verdict.refused += 1
            self.verdict.refusals.append(str(error))
            return "", []
        decoded = plain.decoded(delta)
        holds_word = any(word in text for text in reply.texts() for word in self.words)
        wrong = ("" if holds_word else _unshown(reply, decoded)) or _repr(decoded)
        if wrong:
            return Difference(wrong, self.seed, number, whole[-len(decoded) :], decoded)
        if how is None:  # truncated reasoning that is stripped
            self.verdict.skipped += 1
            return "", []
        if answer.cut is None:
            self.stops.add((how.stop, bool(answer.calls)))
        self.verdict.tails += 1
        start = how.after if answer.cut else how.at
        if delta != plain.ids(whole, start):
            return Difference("the delta", self.seed, number, whole[start:], decoded)
        return self._extended(number, text, ids, prompt, alone, whole, how, delta)

    def _shown(self, number: int) -> str:
        """Render the conversation with a word in each empty result, so that an end after the results is not
        mistaken for an end of the call."""
        answer, reply = self.chat.turns[number]
        worded = replace(reply, results=tuple(texts or ("zq0v",) for texts in reply.results))
        turns = (*self.chat.turns[:number], (answer, worded))
        return self.plain.of(replace(self.chat, turns=turns), number + 1)

    def _extended(
        self, number: int, text: str, ids: list[int], prompt: str, alone: str, whole: str, how: Ended,
        delta: list[int],
    ) -> Difference | tuple[str, list[int]]:  # fmt: skip
        """Compare all ids so far, if the template only extends its earlier text."""
        answer = self.chat.turns[number][0]
        if not text or text != prompt or not alone.startswith(prompt):
            return "", []
        end = alone.rfind(answer.last) + len(answer.last)
        sampled = alone[len(prompt) : end] + ("" if answer.cut else how.sampled)
        start = how.after if answer.cut else how.at
        if whole[:start] != prompt + sampled:
            return "", []
        everything = self.plain.ids(whole)
        boundary = len(everything) - len(delta)
        if everything[: len(ids)] != ids:  # the completion merges with the prompt when encoded together
            return "", []
        if everything[boundary:] != delta:
            return Difference("all ids", self.seed, number, whole, self.plain.decoded([*ids, *delta]))
        self.verdict.whole += 1
        return whole, everything


def _unshown(reply: Reply, decoded: str) -> str:
    """Return which text of a reply is not shown once and in order, or ""."""
    at = 0
    for text in reply.texts():
        forms = {text.strip(), json.dumps(text, ensure_ascii=False)[1:-1].strip(), json.dumps(text)[1:-1].strip()}
        forms |= {text.replace("'", "\\u0027").strip()}
        places = [(form, decoded.find(form, at)) for form in forms]
        form, place = max(places, key=lambda pair: (pair[1] >= 0, len(pair[0])))
        count = max(decoded.count(form) for form in forms)
        if place < 0 or count != 1:
            return f"the text {text!r} is shown {count} times{'' if place >= 0 else ', or out of order'}"
        at = place + len(form)
    return ""


def _repr(decoded: str) -> str:
    found = REPRS.search(decoded)
    return f"a Python value is written: {found[0]!r}" if found else ""
