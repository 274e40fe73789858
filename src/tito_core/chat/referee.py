"""The referee of deltas (law 7): transformers' own plain rendering of whole conversations.

`Referee` renders, and `Judge` compares deltas with its renderings: their tokens, and where an engine would stop. They
convert Strands messages with their own code and import nothing that makes deltas (enforced by import-linter), so that
the two sides share no mistakes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""transformers 5.23 copies reasoning under these names too (`chat_template_utils._alias_reasoning_fields`)."""
_UNIQUE_ID = re.compile(r"call_[0-9a-f]{8}_\d+\.(?P<sampled>.+)", re.DOTALL)
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_TOOL = {
    "name": "zqtool",
    "description": "Zq.",
    "inputSchema": {"json": {"type": "object", "properties": {"zqkey": {"type": "string"}}, "required": []}},
}
CONTEXT = 60
"""Characters shown on each side of the first difference."""
_QUESTION = {"role": "user", "content": [{"text": "Why n000."}]}
_WORD = re.compile(r"\bn\d{3}\b")
"""The number in each text of a probe."""


class RefusedError(ValueError):
    """The template raises on these messages."""


class Referee:
    """Renders conversations as transformers does, from plain strings.

    Args:
        source: The chat template.
        variables: The tokenizer's special tokens and the template arguments.
        now: Returns the time for `strftime_now`.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], now: Callable[[], datetime] = datetime.now) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template  # takes seconds to import

        self.bos = str(variables.get("bos_token", ""))
        self._compiled = _compile_jinja_template(source)
        self._variables = {**variables, "strftime_now": lambda layout: now().strftime(layout)}

    def render(
        self,
        messages: Sequence[Any],
        system: str | None,
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return the plain rendering of Strands messages.

        Raises:
            RefusedError: The template raises.
        """
        return self._rendered(self.conversion, messages, system, tools, generation_prompt)

    @cached_property
    def conversion(self) -> Conversion:
        """The conversion under which the template shows most of a small conversation; on a tie, the default one."""
        question = {"role": "user", "content": [{"text": "zqask"}]}
        use = {"toolUse": {"toolUseId": "call_zq", "name": "zqtool", "input": {"zqkey": "zqvalue"}}}
        thought = {"reasoningContent": {"reasoningText": {"text": "zqthought"}}}
        result = {"toolUseId": "call_zq", "status": "success", "content": [{"text": "zqseen"}]}
        rounds: list[list[Any]] = [
            [question, {"role": "assistant", "content": [{"text": "zqsay"}]}, question],
            [question, {"role": "assistant", "content": [use]}],
            [question, {"role": "assistant", "content": [use]}, {"role": "user", "content": [{"toolResult": result}]}],
            [question, {"role": "assistant", "content": [thought, {"text": "zqbeside"}, use]}],
        ]
        options = [Conversion(*flags) for flags in product((False, True), repeat=4)]
        return max(options, key=lambda option: sum(self._count_shown(option, messages) for messages in rounds))

    def _count_shown(self, conversion: Conversion, messages: Sequence[Any]) -> int:
        """Count the words of a conversation that its rendering shows, except as Python or JSON literals."""
        words = set(re.findall(r"zq[a-z]+", json.dumps(messages))) - {"zqvalue"}
        counts = [0]
        for tools in (None, [_TOOL]):
            try:
                text = self._rendered(conversion, messages, None, tools, False)
            except RefusedError:
                continue
            plain = re.sub(r"""(?:'|\\")zq[a-z]+""", "", text)
            start = plain.find("zqask")
            counts.append(1 + sum(word in plain[max(start, 0) :] for word in words))
        return max(counts)

    def _rendered(
        self,
        conversion: Conversion,
        messages: Sequence[Any],
        system: str | None,
        tools: Sequence[Any] | None,
        generation_prompt: bool,
    ) -> str:
        functions = [{"type": "function", "function": _function(tool)} for tool in tools or ()]
        try:
            return str(
                self._compiled.render(
                    messages=conversion.messages(messages, system),
                    tools=functions or None,
                    documents=None,
                    add_generation_prompt=generation_prompt,
                    **self._variables,
                )
            )
        except Exception as error:  # a template may raise any exception
            raise RefusedError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Conversion:
    """How Strands messages are converted for a template.

    Attributes:
        parts: Content is a list of `{"type": "text"}` parts, not a string.
        json_arguments: A call's arguments are JSON text, not a mapping.
        short_ids: Call ids have nine letters or digits, as Mistral's templates require.
        text_or_reasoning: A message with calls has text or reasoning, not both, as gpt-oss requires.
    """

    parts: bool = False
    json_arguments: bool = False
    short_ids: bool = False
    text_or_reasoning: bool = False

    def messages(self, messages: Sequence[Any], system: str | None) -> list[dict[str, Any]]:
        """Convert a history."""
        converted = [{"role": "system", "content": self._content(system)}] if system else []
        calls: list[Any] = []
        for message in messages:
            texts = [block["text"] for block in message["content"] if "text" in block]
            images = any("image" in block for block in message["content"])
            if message["role"] == "assistant":
                calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
                converted.append(self._answer(message, texts, calls))
                continue
            results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
            names = {call["toolUseId"]: call["name"] for call in calls}
            order = {call_id: position for position, call_id in enumerate(names)}
            for result in sorted(results, key=lambda each: order.get(each["toolUseId"], len(order))):
                call_id = result["toolUseId"]
                converted.append(
                    {
                        "role": "tool",
                        "tool_call_id": self._id(call_id),
                        "name": names.get(call_id, ""),
                        "content": self._mixed(result["content"]),
                    }
                )
            if texts or images or not results:
                converted.append({"role": "user", "content": self._mixed(message["content"])})
        return converted

    def _mixed(self, blocks: Sequence[Any]) -> Any:
        """Return the texts and images of a message or tool result; a list of parts if there is an image."""
        runs: list[list[str] | None] = [[]]  # None is an image
        for block in blocks:
            if "image" in block:
                runs += [None, []]
            elif "text" in block or "json" in block:
                run = runs[-1]
                assert run is not None
                run.append(block["text"] if "text" in block else _json(block["json"]))
        if len(runs) == 1:
            return self._content("\n".join(runs[0] or []))
        return [
            {"type": "image"} if run is None else {"type": "text", "text": "\n".join(run)}
            for run in runs
            if run is None or run
        ]

    def _answer(self, message: Any, texts: list[str], calls: list[Any]) -> dict[str, Any]:
        blocks = [block["reasoningContent"] for block in message["content"] if "reasoningContent" in block]
        reasoning = [block["reasoningText"]["text"] for block in blocks if "reasoningText" in block]
        answer: dict[str, Any] = {"role": "assistant", "content": self._content("\n".join(texts))}
        if reasoning and not (self.text_or_reasoning and calls and any(texts)):
            answer |= dict.fromkeys(_REASONING_KEYS, "\n".join(reasoning))
        if calls:
            answer["tool_calls"] = [
                {
                    "id": self._id(call["toolUseId"]),
                    "type": "function",
                    "function": {
                        "name": call["name"],
                        "arguments": _json(call["input"]) if self.json_arguments else call["input"],
                    },
                }
                for call in calls
            ]
        return answer

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.parts else text

    def _id(self, call_id: str) -> str:
        unique = _UNIQUE_ID.fullmatch(call_id)
        sampled = unique["sampled"] if unique else call_id
        if self.short_ids and not _SHORT_ID.fullmatch(sampled):
            return hashlib.sha256(sampled.encode("utf-8", "surrogatepass")).hexdigest()[:9]
        return sampled


def _function(tool: Any) -> dict[str, Any]:
    schema = tool["inputSchema"]
    parameters = schema.get("json", schema)
    return {"name": tool["name"], "description": tool.get("description", ""), "parameters": parameters}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Difference:
    """The texts of a plain rendering and of a delta that differs from it."""

    expected: str
    found: str

    def __str__(self) -> str:
        at = next((i for i, (a, b) in enumerate(zip(self.expected, self.found, strict=False)) if a != b), None)
        at = min(len(self.expected), len(self.found)) if at is None else at
        window = slice(max(0, at - CONTEXT), at + CONTEXT)
        return f"at character {at}:\n  template: {self.expected[window]!r}\n  delta:    {self.found[window]!r}"


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """An assistant message in its conversation.

    Attributes:
        before: Strands messages before it.
        answer: The assistant message.
        new: The messages after it.
        completed: Whether the policy ended it itself; False if it was truncated.
    """

    before: Sequence[Any]
    answer: Any
    new: Sequence[Any]
    system: str | None = None
    tools: Sequence[Any] | None = None
    completed: bool = True


Delta = Callable[[int | None], list[int]]
"""Returns the ids after a turn, given its last sampled token, or None for a truncated turn."""


class Judge:
    """Compares deltas with a referee's renderings.

    Args:
        referee: Renders conversations.
        encode: Encodes text with the tokenizer itself, with control tokens and without adding any.
        decode: Decodes ids, with control tokens.
        controls: Texts of the control tokens by id.
        stops: The engine's stop token ids, which are judged too.
        eos: Id of the tokenizer's eos_token, which ends turns that the template shows without a stop.
    """

    def __init__(
        self,
        referee: Referee,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        controls: Mapping[int, str],
        stops: Set[int],
        eos: int | None,
    ) -> None:
        self.referee = referee
        self._encode = encode
        self._decode = decode
        self._controls = controls
        self._stops = stops
        self._eos = eos
        self._headers: dict[str, list[int]] = {}

    def difference(self, turn: JudgedTurn, delta: Delta) -> Difference | None:
        """Return how a delta differs from the plain rendering, or None if it is right.

        Raises:
            RefusedError: The template refuses the conversation, or leaves out tool results or calls.
        """
        history = [*turn.before, turn.answer, *turn.new]
        whole = self.referee.render(history, turn.system, turn.tools)
        words = list(_words(turn.new))
        if (found := [word for word in _WORD.findall(whole) if word in words]) != words:
            results = set(_words(_results(turn.new)))
            if results and results.isdisjoint(found) and found == [word for word in words if word not in results]:
                raise RefusedError("It leaves out tool results.")  # refused in use as well
            return Difference(f"(each text once: {words})", f"({found})")
        start = whole.find(words[0]) if words else len(whole)
        if not _shows_calls(turn, whole, start):
            raise RefusedError("It leaves out the calls of the answer.")
        rest = _after(turn.answer, whole, start)
        if rest is None:  # the turn shows no text: truncated reasoning, or a call without arguments
            expected, found = self._encode(whole), delta(min(self._stops))
            return self._unless_equal(expected[len(expected) - len(found) :], found, words)
        if not turn.completed:
            return self._unless_equal(self._encode(rest), delta(None), words)
        alone = self.referee.render([*turn.before, turn.answer], turn.system, turn.tools, generation_prompt=False)
        tail = self._encode(_after(turn.answer, alone, len(alone)) or "")
        stop = next((token for token in tail if token in self._stops), None)
        stop_fault = self._wrong_stop(turn, alone, tail, stop, whole[len(whole) - len(rest) : start])
        if stop_fault is not None:
            return Difference(self._decode(tail), stop_fault)
        ids = self._encode(rest)
        if stop is None and self._eos in self._stops and self._stops.isdisjoint(ids):
            stop = self._eos
        if stop is not None and stop not in ids:
            # Another control token replaces the sampled one (gpt-oss, if a message follows).
            at = next((i for i, token in enumerate(ids) if token in self._controls), len(ids))
        else:
            at = next((i for i, token in enumerate(ids) if token in self._stops), len(ids))
            stop = stop if stop is not None or at == len(ids) else ids[at]
        return self._unless_equal(ids[at + 1 :], delta(stop), words)

    def moves_text(self, turn: JudgedTurn) -> bool:
        """Return whether the plain rendering moves a turn's text behind its first call, or into a turn of its own.

        Raises:
            RefusedError: The template refuses the conversation.
        """
        for new, prompt in ((turn.new, True), ((), False)):
            history = [*turn.before, turn.answer, *new]
            whole = self.referee.render(history, turn.system, turn.tools, generation_prompt=prompt)
            texts, calls = (
                [whole.rfind(word) for block in turn.answer["content"] if kind in block for word in _words_of(block)]
                for kind in ("text", "toolUse")
            )
            text, call = max(texts, default=-1), min(calls, default=-1)
            if min(text, call) < 0:
                continue  # left out, not moved
            if text > call or not self._stops.isdisjoint(self._encode(whole[text:call])):
                return True
        return False

    def _wrong_stop(self, turn: JudgedTurn, alone: str, tail: list[int], stop: int | None, between: str) -> str | None:
        """Return why an engine would not stop at the turn's end in the plain rendering; None if it would.

        Args:
            turn: The turn.
            alone: The rendering that ends with it.
            tail: Ids of `alone` after the turn's last text.
            stop: The first stop among them.
            between: Text from the turn's last text to the next message's first one; empty if none follows.
        """
        until = tail if stop is None else tail[: tail.index(stop)]
        openers = self._openers(turn, alone)
        if stop is not None and not openers.isdisjoint([*until, stop]) and not self._controls.keys().isdisjoint(until):
            return f"(the engine would stop at {self._controls[stop]!r}, after the next message has begun)"
        header = self._header(turn)
        closed = bool(header) and header[0] in self._stops  # the question's closer comes first, if there is one
        opener = next((i for i, token in enumerate(header) if token in openers), int(closed))
        begins = {stop, *openers, *header[opener:]}  # some templates always write a generation prompt
        ends = (
            self._stops | self._controls.keys() & set(self._encode(between))
        ) - begins  # another token may end conversations
        later = [token for token in tail[len(until) :] if token in ends]
        if later and stop not in openers:
            return f"(the engine would stop at {self._controls[stop or 0]!r}, before {self._controls[later[0]]!r})"
        inside = self._encode(_between(turn.answer, alone))
        early = next((token for token in inside if token in self._stops), None)
        return f"(the engine would stop at {self._controls[early]!r}, within the turn)" if early is not None else None

    def _header(self, turn: JudgedTurn) -> list[int]:
        """Return the control tokens between a question and its answer; cached."""
        key = repr((turn.system, turn.tools))
        if key not in self._headers:
            try:
                prompt = self.referee.render([_QUESTION], turn.system, turn.tools)
            except RefusedError:
                prompt = ""
            tail = self._encode(prompt[prompt.rfind("n000") :])
            self._headers[key] = [token for token in tail if token in self._controls]
        return self._headers[key]

    def _openers(self, turn: JudgedTurn, text: str) -> set[int]:
        """Return the control tokens before the first text of a rendering, without those that close messages."""
        ids = self._encode(text)
        start = next((i for i, token in enumerate(ids) if token not in self._controls), len(ids))
        openers = {token for token in ids[:start] if self._controls[token] != self.referee.bos}
        return openers - set(self._header(turn)[:1])

    def _unless_equal(self, expected: list[int], found: list[int], words: list[str]) -> Difference | None:
        text = self._decode(found)
        if expected != found:
            return Difference(self._decode(expected), text)
        if (numbers := _WORD.findall(text)) != words:  # texts are shown before the turn's end
            return Difference(text, f"(shows the texts {numbers} instead of {words})")
        return None


def _words(messages: Iterable[Any]) -> Iterator[str]:
    """Yield the numbers of texts in the order that a rendering should show: results in the order of the calls."""
    for message in messages:
        results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
        results.sort(key=lambda result: int(result["toolUseId"].removeprefix("call_")))
        texts = [block for block in message["content"] if "toolResult" not in block]
        for part in (*results, *texts):
            yield from _words_of(part)


def _words_of(part: Any) -> list[str]:
    return _WORD.findall(json.dumps(part, ensure_ascii=False, default=repr))  # an image's bytes are not JSON


def _shows_calls(turn: JudgedTurn, whole: str, until: int) -> bool:
    """Return whether a rendering names the answer's first called tool between the earlier and the new messages."""
    start = max((whole.rfind(word) for word in _words_of(turn.before)), default=-1)
    name = next((block["toolUse"]["name"] for block in turn.answer["content"] if "toolUse" in block), "")
    return whole.find(name, max(start, 0), until) >= 0


def _results(messages: Sequence[Any]) -> list[Any]:
    """Return the messages with only their tool results."""
    return [{"content": [block for block in message["content"] if "toolResult" in block]} for message in messages]


def _places(answer: Any, text: str, until: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the last occurrence of each of a turn's texts before `until`."""
    found = [(text.rfind(word, 0, until), len(word)) for word in _words_of(answer)]
    return sorted((at, at + length) for at, length in found if at >= 0)


def _after(answer: Any, text: str, until: int) -> str | None:
    """Return the rendering after the full stop of a turn's last text; None if it shows none."""
    places = _places(answer, text, until)
    return text[places[-1][1] + 1 :] if places else None


def _between(answer: Any, text: str) -> str:
    """Return the rendering between the first and the last text of a turn."""
    places = _places(answer, text, len(text))
    return text[places[0][1] : places[-1][0]] if places else ""
