"""A tokenizer and its chat template in transformers, analysed by renderings alone.

Imports nothing of ours; `plain_referee` takes its expected values from here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from support.random_chats import Answer, Chat, Reading, Reply, openai_answer


class Plain:
    """A tokenizer and its chat template in transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = sorted(filter(str.strip, tokenizer.get_added_vocab()), key=len, reverse=True)  # Gemma has added blanks
        self.controls = re.compile("|".join(map(re.escape, added))) if added else re.compile(r"(?!)")
        self.needs_tools = False
        self.reading = self._read()
        if self.reading is None:  # some templates render nothing at all without tools
            self.needs_tools = True
            self.reading = self._read()
        self.openers = self._openers() if self.reading else frozenset()
        self.ends = self._ends() if self.reading else frozenset()
        self.inner = (self._inner(calls=False), self._inner(calls=True)) if self.reading else (frozenset(),) * 2

    def render(self, messages: list[Any], tools: Any = None, prompt: bool = False) -> str:
        """Return the rendering; raise any exception of the template."""
        if self.needs_tools and not tools:
            tools = Chat("", 3, "", ()).openai_tools()
        shown: str = self.tokenizer.apply_chat_template(
            json.loads(json.dumps(messages)), tools=tools, add_generation_prompt=prompt, tokenize=False
        )
        return shown

    def of(self, chat: Chat, turns: int, answer: Answer | None = None) -> str:
        """Render the first turns of a conversation with a generation prompt, or with an answer as the last message."""
        assert self.reading is not None
        messages = chat.openai(turns, self.reading)
        if answer is not None:
            messages.append(openai_answer(answer, turns, self.reading))
        return self.render(messages, chat.openai_tools(), prompt=answer is None)

    def ids(self, text: str, start: int = 0) -> list[int]:
        """Encode a rendering and return the ids from character `start` on."""
        encoded = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        if not start:
            return list(encoded.ids)
        pairs = zip(encoded.ids, encoded.offsets, strict=True)
        return [token for token, (begin, end) in pairs if begin >= start and end > start]

    def decoded(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def control_tokens(self, text: str) -> list[tuple[str, int]]:
        """Return (control token, end) of each control token in a text."""
        return [(match[0], match.end()) for match in self.controls.finditer(text)]

    def closers(self, text: str) -> list[tuple[str, int]]:
        """Return the control tokens up to the first that opens an answer."""
        return list(takewhile(lambda pair: pair[0] not in self.openers, self.control_tokens(text)))

    def shows(self, words: list[str], messages: list[Any], tools: Any = None) -> str | None:
        """Return the rendering if it shows these words in order, else None."""
        try:
            text = self.render(messages, tools)
        except Exception:  # a template may raise any exception
            return None
        places = [text.find(word) for word in words]
        return text if -1 not in places and places == sorted(places) else None

    def _read(self) -> Reading | None:
        """Return what the template reads, found by rendering; None if it does not show a question."""
        plain = Reading(arguments="mapping", parts=False)
        question = Chat("", 0, "zq1v", ())
        for parts in (False, True):
            reading = replace(plain, parts=parts)
            if self.shows(["zq1v"], question.openai(0, reading)):
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
            alone, called = ([*question.openai(0, tried), openai_answer(answer, 0, tried)] for answer in thought)
            if self.shows(["zq2v"], alone) or self.shows(["zq2v"], called, tools):
                moved = self.shows(["zq3v", "zq2v"], called, tools) is not None
                return replace(tried, thought_and_calls=not moved)
        return replace(reading, reasoning=None)

    def _read_calls(self, reading: Reading) -> Reading:
        tools = Chat("", 3, "", ()).openai_tools()
        call = ("look", {"zz": "zq2v"})
        one = Answer("", "", (call,), "zq2v"), Reply((("zq3v",),), "")
        two = Answer("", "", (call, ("look", {"zz": "zq4v"})), "zq4v"), Reply((("zq5v",), ("zq6v",)), "")
        with_text = Answer("zq1v", "", (call,), "zq2v"), Reply((("zq3v",),), "")
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
                    text_and_calls=shown(with_text, "0123", tried) is not None,
                    results_and_question=shown(both, "0237", tried) is not None,
                )
        return replace(reading, tools=False)

    def _openers(self) -> frozenset[str]:
        """Return the control tokens that open an answer, and the first of a conversation."""
        assert self.reading is not None
        messages = Chat("", 0, "zq1v", ()).openai(0, self.reading)
        question = self.render(messages)
        try:
            prompted = self.render(messages, prompt=True)
        except Exception:  # as in `shows`
            prompted = question
        opening = prompted.removeprefix(question) if prompted.startswith(question) else ""
        first = [pair for pair in self.control_tokens(question) if pair[0] != self.tokenizer.bos_token][:1]
        return frozenset(text for text, _ in [*first, *self.control_tokens(opening)])

    def _ends(self) -> frozenset[str]:
        """Return the control tokens between an answer of text and the opener of the next question."""
        assert self.reading is not None
        chat = Chat("", 0, "zq1v", ((Answer("zq2v", "", (), "zq2v"), Reply((), "zq3v")),))
        try:
            text = self.render(chat.openai(1, self.reading))
        except Exception:  # as in `shows`
            return frozenset()
        between = text[text.rfind("zq2v") : text.rfind("zq3v")]
        return frozenset(control for control, _ in self.closers(between))

    def _inner(self, *, calls: bool) -> frozenset[str]:
        """Return the control tokens inside answers or calls; a token that closes a part of a turn is not a stop."""
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
        return frozenset(control for control, _ in self.control_tokens(text[begin : text.rfind("zq4v")]))


@dataclass(frozen=True)
class Ended:
    """How the plain rendering ends a turn.

    Attributes:
        stop: The control token at which an engine stops.
        sampled: Text that the policy samples after the turn's last word, with the stop.
        at: Position in the whole rendering where the delta begins.
        after: Position after the turn's last word.
    """

    stop: str
    sampled: str
    at: int
    after: int


def ended(plain: Plain, answer: Answer, alone: str, whole: str) -> Ended | None:
    """Compare a turn at the end of a conversation with the same turn followed by messages.

    The text that both have after the turn's last word, up to the next message's opener, closes the turn; its last
    control token is the stop. If only the turn at the end has a stop (gpt-oss), the other rewrites it. If nothing
    closes a turn (GLM), the next message's opener is the stop. An engine stops at the first occurrence of the stop.
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
        markup = answer.calls and stops[-1] not in plain.ends
        then = rewritten[common : common + 1] if markup else []
        if then and then[0][0] in plain.ends - inner and not re.search(r"zq\d+v", later[: then[0][1]]):
            stop, end = then[0]  # a closer of answers follows the call's markup
            return Ended(stop, later[:end], after + end, after)
        end, other = (next(end for text, end in found if text == stops[-1]) for found in (closers, rewritten))
        return Ended(stops[-1], rest[:end], after + other, after)
    if own := [pair for pair in closers if pair[0] not in inner]:
        stop, end = own[-1]
        return Ended(stop, rest[:end], after + (rewritten[-1][1] if rewritten else 0), after)
    if openers := [pair for pair in plain.control_tokens(later) if pair[0] not in inner]:
        stop, end = openers[0]
        return Ended(stop, later[:end], after + end, after)
    return None
