"""Hold a certified template to transformers' plain rendering of whole conversations (law 7).

Independent of what it judges: of `tito_core.chat` it only calls the results that anybody can call (`first_prompt`,
`delta`, `stop_ids`, `certificate`) and the argument `Opened`. Messages, renderings, ids, stops and expected deltas are
worked out here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from random import Random
from typing import Any

from support.random_chats import (
    Answer,
    Chat,
    Reading,
    Reply,
    Writer,
    openai_answer,
    strands_answer,
    strands_reply,
)
from tito_core.chat.ending import Opened
from tito_core.chat.template import ChatTemplate, TemplateError

REPRS = re.compile(r"<bound method|Undefined|Traced|Opaque|<function |<jinja2|object at 0x|<generator")
SHOWN = 60
"""Characters shown around a difference."""


@dataclass(frozen=True)
class Difference:
    """A turn that is not what the plain rendering says."""

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
    """What was compared.

    Attributes:
        whole: Turns after which all ids so far were compared with the whole rendering's.
        tails: Turns whose delta was compared with the end of the rendering.
        refused: Turns that the certified template refused at run time.
        skipped: Turns that the plain rendering refuses, or of whose answer it shows nothing.
    """

    conversations: int = 0
    whole: int = 0
    tails: int = 0
    refused: int = 0
    skipped: int = 0
    differences: list[Difference] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


class Plain:
    """A tokenizer and its template as transformers has them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = sorted(filter(str.strip, tokenizer.get_added_vocab()), key=len, reverse=True)  # Gemma has added blanks
        self.controls = re.compile("|".join(map(re.escape, added))) if added else re.compile(r"(?!)")
        self.reading = self._read()
        self.openers = self._openers() if self.reading else frozenset()
        self.inner = (self._inner(calls=False), self._inner(calls=True)) if self.reading else (frozenset(),) * 2

    def render(self, messages: list[Any], tools: Any = None, prompt: bool = False) -> str:
        """Give the rendering as text; raises whatever the template raises."""
        shown: str = self.tokenizer.apply_chat_template(
            json.loads(json.dumps(messages)), tools=tools, add_generation_prompt=prompt, tokenize=False
        )
        return shown

    def of(self, chat: Chat, turns: int, answer: Answer | None = None) -> str:
        """Render the first turns of a conversation, to be answered, or with the next answer as the last message."""
        assert self.reading is not None
        messages = chat.openai(turns, self.reading)
        if answer is not None:
            messages.append(openai_answer(answer, turns, self.reading))
        return self.render(messages, chat.openai_tools(), prompt=answer is None)

    def ids(self, text: str, start: int = 0) -> list[int]:
        """Encode a rendering, and give the ids from a character on."""
        encoded = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        if not start:
            return list(encoded.ids)
        pairs = zip(encoded.ids, encoded.offsets, strict=True)
        return [token for token, (begin, end) in pairs if begin >= start and end > start]

    def decoded(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def found(self, text: str) -> list[tuple[str, int]]:
        """List the control tokens of a text, each with the place of its end."""
        return [(found[0], found.end()) for found in self.controls.finditer(text)]

    def closers(self, text: str) -> list[tuple[str, int]]:
        """List those up to the first that opens an answer."""
        return list(takewhile(lambda pair: pair[0] not in self.openers, self.found(text)))

    def shows(self, words: list[str], messages: list[Any], tools: Any = None) -> str | None:
        """Give a rendering that holds these words in this order, or None."""
        try:
            text = self.render(messages, tools)
        except Exception:  # a template is a program: it raises whatever its author made it raise
            return None
        places = [text.find(word) for word in words]
        return text if -1 not in places and places == sorted(places) else None

    def _read(self) -> Reading | None:
        """Find what the template reads, by renderings alone; None where it shows not even a question."""
        plain = Reading(arguments="mapping", parts=False)
        asked = Chat("", 0, "zq1v", ())
        for parts in (False, True):
            reading = replace(plain, parts=parts)
            if self.shows(["zq1v"], asked.openai(0, reading)):
                break
        else:
            return None
        system = Chat("zq0v", 0, "zq1v", ()).openai(0, reading)
        reading = replace(reading, system=self.shows(["zq0v"], system) is not None)
        reading = self._read_calls(reading)
        keys = ("reasoning_content", "thinking", "reasoning")
        thought = Answer("zq3v", "zq2v", (), "zq3v"), Answer("", "zq2v", (("look", {"zz": "zq3v"}),), "zq3v")
        tools = Chat("", 1, "", ()).openai_tools()
        for key in keys:
            tried = replace(reading, reasoning=key)
            alone, called = ([*asked.openai(0, tried), openai_answer(answer, 0, tried)] for answer in thought)
            if self.shows(["zq2v"], alone) or self.shows(["zq2v"], called, tools):
                moved = self.shows(["zq3v", "zq2v"], called, tools) is not None
                return replace(tried, thought_and_calls=not moved)
        return replace(reading, reasoning=None)

    def _read_calls(self, reading: Reading) -> Reading:
        tools = Chat("", 3, "", ()).openai_tools()
        call = ("look", {"zz": "zq2v"})
        one = Answer("", "", (call,), "zq2v"), Reply((("zq3v",),), "")
        two = Answer("", "", (call, ("look", {"zz": "zq4v"})), "zq4v"), Reply((("zq5v",), ("zq6v",)), "")
        beside = Answer("zq1v", "", (call,), "zq2v"), Reply((("zq3v",),), "")
        both = one[0], Reply((("zq3v",),), "zq7v")

        def shown(turn: tuple[Answer, Reply], words: str, tried: Reading) -> str | None:
            messages = Chat("", 3, "zq0v", (turn,)).openai(1, tried)
            return self.shows([f"zq{word}v" for word in words], messages, tools)

        for arguments in ("mapping", "string"):
            tried = replace(reading, arguments=arguments)
            text = shown(one, "023", tried)
            if text and "'zz'" not in text and '\\"zz' not in text:
                return replace(
                    tried,
                    parallel=shown(two, "02456", tried) is not None,
                    beside=shown(beside, "0123", tried) is not None,
                    results_and_question=shown(both, "0237", tried) is not None,
                )
        return replace(reading, tools=False)

    def _openers(self) -> frozenset[str]:
        """Collect the control tokens that open an answer, and the first of a conversation."""
        assert self.reading is not None
        messages = Chat("", 0, "zq1v", ()).openai(0, self.reading)
        asked = self.render(messages)
        try:
            prompted = self.render(messages, prompt=True)
        except Exception:  # as in `shows`
            prompted = asked
        opening = prompted.removeprefix(asked) if prompted.startswith(asked) else ""
        first = [pair for pair in self.found(asked) if pair[0] != self.tokenizer.bos_token][:1]
        return frozenset(text for text, _ in [*first, *self.found(opening)])

    def _inner(self, *, calls: bool) -> frozenset[str]:
        """Collect the control tokens inside answers, or calls: what closes a part of a turn is no stop."""
        assert self.reading is not None
        first, last = ("look", {"zz": "zq3v"}), ("look", {"zz": "zq4v"})
        answer = Answer("zq4v", "zq2v", (), "zq4v")
        if calls:
            answer = Answer("", "zq2v", (first, last) if self.reading.parallel else (last,), "zq4v")
        messages = [*Chat("", 0, "zq1v", ()).openai(0, self.reading), openai_answer(answer, 0, self.reading)]
        try:
            text = self.render(messages, Chat("", 3, "", ()).openai_tools() if calls else None)
        except Exception:  # as in `shows`
            return frozenset()
        begin = min((at for at in map(text.find, ("zq2v", "zq3v", "zq4v")) if at >= 0), default=len(text))
        return frozenset(control for control, _ in self.found(text[begin : text.rfind("zq4v")]))


@dataclass(frozen=True)
class Ended:
    """How the plain rendering ends a turn.

    Attributes:
        stop: The control token at which an engine stops.
        sampled: What the policy samples after the turn's last word, the stop included.
        at: Place in the rendering of the whole where the delta begins.
        after: Place after the turn's last word.
    """

    stop: str
    sampled: str
    at: int
    after: int


def ended(plain: Plain, answer: Answer, alone: str, whole: str) -> Ended | None:
    """Compare a turn at the end of a conversation with the same turn in front of messages.

    What both write after the turn's last word, up to the next message's opener, closes the turn; its last control token
    is the stop. Where only the turn at the end has one (gpt-oss), the other rewrites it. Where nothing closes a turn
    (GLM), the next message's opener is the stop. An engine stops where the stop occurs first.
    """
    here, there = alone.rfind(answer.last), whole.rfind(answer.last)
    if here < 0 or there < 0:
        return None
    inner = plain.inner[bool(answer.calls)]
    rest, later = alone[here + len(answer.last) :], whole[there + len(answer.last) :]
    closers, rewritten = plain.closers(rest), plain.closers(later)
    after = there + len(answer.last)
    common = 0
    for (text, _), (other, _) in zip(closers, rewritten, strict=False):
        if text != other:
            break
        common += 1
    if stops := [text for text, _ in closers[:common] if text not in inner]:
        end, other = (next(end for text, end in found if text == stops[-1]) for found in (closers, rewritten))
        return Ended(stops[-1], rest[:end], after + other, after)
    if own := [pair for pair in closers if pair[0] not in inner]:
        stop, end = own[-1]
        return Ended(stop, rest[:end], after + (rewritten[-1][1] if rewritten else 0), after)
    if openers := [pair for pair in plain.found(later) if pair[0] not in inner]:
        stop, end = openers[0]
        return Ended(stop, later[:end], after + end, after)
    return None


def judge(template: ChatTemplate, tokenizer: Any, seeds: Iterator[str], most: int = 6) -> Verdict:
    """Play conversations, up to the first few differences."""
    plain, verdict = Plain(tokenizer), Verdict()
    if plain.reading is None:
        verdict.differences.append(Difference("the plain rendering shows no question", "", 0, "", ""))
        return verdict
    if not template.certificate.tools:
        plain.reading = replace(plain.reading, tools=False)
    stops: set[tuple[str, bool]] = set()
    for seed in seeds:
        random = Random(seed)
        chat = Writer(random, plain.reading).chat(random.randint(1, 5))
        verdict.conversations += 1
        verdict.differences += _Played(template, plain, chat, seed, verdict, stops).differences()
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

    def differences(self) -> list[Difference]:
        """Play a conversation up to its first difference."""
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
        """Compare the first prompt of the whole conversation, as a branch would send it."""
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
        how = ended(plain, answer, alone, whole)
        stop = None if answer.cut or how is None else plain.ids(how.stop)[-1]
        opened = Opened.REASONING if answer.cut == "thought" else Opened.MESSAGE
        try:
            delta = self.template.delta(
                strands_answer(answer, number), [strands_reply(reply, number)], stop,
                opened=opened, tool_specs=chat.strands_tools(), history=chat.strands(number),
            ).ids.tolist()  # fmt: skip
        except TemplateError as error:
            self.verdict.refused += 1
            self.verdict.refusals.append(str(error))
            return "", []
        decoded = plain.decoded(delta)
        wrong = _unshown(reply, decoded) or _repr(decoded)
        if wrong:
            return Difference(wrong, self.seed, number, whole[-len(decoded) :], decoded)
        if how is None:  # reasoning that was cut off, and stripped before what follows
            self.verdict.skipped += 1
            return "", []
        if answer.cut is None:
            self.stops.add((how.stop, bool(answer.calls)))
        self.verdict.tails += 1
        start = how.after if answer.cut else how.at
        if delta != plain.ids(whole, start):
            return Difference("the delta", self.seed, number, whole[start:], decoded)
        return self._extended(number, text, ids, prompt, alone, whole, how, delta)

    def _extended(
        self, number: int, text: str, ids: list[int], prompt: str, alone: str, whole: str, how: Ended,
        delta: list[int],
    ) -> Difference | tuple[str, list[int]]:  # fmt: skip
        """Compare all ids so far, where the template only adds to what it wrote."""
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
        if everything[: len(ids)] != ids:  # what was sampled merges with the prompt's end when both are encoded at once
            return "", []
        if everything[boundary:] != delta:
            return Difference("all ids", self.seed, number, whole, self.plain.decoded([*ids, *delta]))
        self.verdict.whole += 1
        return whole, everything


def _unshown(reply: Reply, decoded: str) -> str:
    """Tell which text of a reply is not shown once and in order."""
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
