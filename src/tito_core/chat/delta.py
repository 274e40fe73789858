"""Candidates for rendering a template's delta, and the tail of the rendering that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from strands.types.content import ContentBlock, Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.encoder import ContentSafeEncoder, Control, EncodedText
from tito_core.chat.ending import (
    THOUGHT,
    Ending,
    Opened,
    OpenTags,
    Sample,
    content_start,
    find_run,
    inner_controls,
    learn_answers,
    learn_calls,
    share_closers,
    spelled_tags,
    stops_of,
)
from tito_core.chat.layout import Layouts, learn_layout, shape_of
from tito_core.chat.messages import TemplateMessage, template_messages, template_tools
from tito_core.chat.probes import LOOK, assistant_message, call_message, result_message, user_message
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.traced import Traced
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.provenance import Provenance

_QUESTION = user_message(".")
_ANSWER = assistant_message(".")
_LOOK_CALL = ("look", {"at": "it"})
_CALL = call_message(_LOOK_CALL)
_RESULT = result_message([{"text": "seen"}])
_ROUND: Messages = [_QUESTION, _CALL, _RESULT, _ANSWER, _QUESTION]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A minimal conversation around the turn's calls and the new messages, rendered to obtain their delta.

    Attributes:
        before: Messages before the turn.
        before_after_results: Messages before a turn that follows tool results, if they differ from `before`.
        mirrors_history: Whether the messages before the turn mirror the rollout's own in number and kind, with short
            texts in place of their content.
        system: System prompt.
        tools: No tools, a tool of ours, or those of the rollout.
        remark: Text in front of the calls.
    """

    name: str
    before: Messages = field(default_factory=lambda: [_QUESTION])
    before_after_results: Messages | None = None
    mirrors_history: bool = False
    system: str | None = None
    tools: Literal["none", "ours", "rollout"] = "none"
    remark: str = ""


CANDIDATES = (
    Candidate("after a question"),
    Candidate("after a system prompt and a question", system="."),
    Candidate("after a question, with a tool", tools="ours"),
    Candidate("after a system prompt and a question, with a tool", system=".", tools="ours"),
    Candidate("after a round of tools, with a tool", _ROUND, tools="ours"),
    Candidate("after a round of tools where there was one", before_after_results=_ROUND),
    Candidate("after a question, with text before the calls", remark="."),
    Candidate("after a question, with the rollout's tools", tools="rollout"),
    Candidate("after messages like the rollout's own", mirrors_history=True),
    Candidate("after messages like the rollout's own, with a tool", mirrors_history=True, tools="ours"),
)
"""Ordered by the cost of a delta; the first that is right on all probes is chosen."""


class Switches:
    """Words of earlier content that switch a template, such as `/no_think`; see `switches.find_switches`.

    Args:
        system: Words that matter in the system prompt. A delta is then rendered with the rollout's own one.
        messages: Words that matter in messages. A delta after one is rendered with the rollout's history up to the last
            of them, its system prompt and its tools.
        whole_history: Whether such a delta needs the whole history.
    """

    __slots__ = ("_messages", "_system", "messages", "system", "whole_history")

    def __init__(self, system: Sequence[str] = (), messages: Sequence[str] = (), whole_history: bool = False) -> None:
        self.system, self.messages, self.whole_history = tuple(system), tuple(messages), whole_history
        self._system, self._messages = (tuple(word.lower() for word in words) for words in (system, messages))

    def in_system(self, system: str | None) -> bool:
        """Return whether a system prompt holds a word that matters there, in upper or lower case."""
        return system is not None and _holds(system, self._system)

    def in_message(self, message: Message) -> bool:
        """Return whether a message holds a word that matters in messages, in upper or lower case."""
        return any(_holds(text, self._messages) for text in _strings(message["content"]))

    def needed(self, history: Messages, answer: Message) -> int:
        """Return how many messages of the history a delta after an answer needs; 0 if none."""
        if not self._messages:
            return 0
        last = next((i for i in range(len(history) - 1, -1, -1) if self.in_message(history[i])), None)
        if last is None and not self.in_message(answer):
            return 0
        if self.whole_history:
            return len(history)
        users = (i for i in range(last or 0, len(history)) if history[i]["role"] == "user")
        return next(users, len(history) - 1) + 1


def _holds(text: str, words: tuple[str, ...]) -> bool:
    lowered = text.lower()
    return any(word in lowered for word in words)


def _strings(blocks: Any) -> Iterator[str]:
    """Yield the strings of content blocks; of a tool's arguments and JSON results also keys."""
    for block in blocks:
        if "text" in block:
            yield block["text"]
        elif "toolResult" in block:
            yield from _strings(block["toolResult"]["content"])
        else:
            yield from _inner_strings(block)


def _inner_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _inner_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _inner_strings(item)


@dataclass(frozen=True, slots=True)
class Tail:
    """A rendering and the position in it where the delta begins.

    Attributes:
        text: The stand-in conversation, the new messages and the generation prompt.
        start: Index of the first character after the turn's closing tokens.
        controls: The control tokens from `start` on.
        ending: How the turn ends.
    """

    text: Traced
    start: int
    controls: list[Control]
    ending: Ending


class _StandIn(NamedTuple):
    """A minimal conversation around an answer's calls.

    Attributes:
        opening: The messages before the answer, as template messages.
        turn: The answer's stand-in, and the new messages.
        first: The trace source of the stand-in.
        specs: The tools to render.
        ending: How the answer ends.
        is_fixed: Whether all but `turn` is the same for every delta.
    """

    opening: list[TemplateMessage]
    turn: Messages
    first: int
    specs: Sequence[ToolSpec] | None
    ending: Ending
    is_fixed: bool


@dataclass(frozen=True, slots=True)
class DeltaSource:
    """A candidate bound to a template. Build it with `DeltaSource.of`."""

    rendering: Rendering
    encoder: ContentSafeEncoder
    candidate: Candidate
    answers: Ending
    calls: Ending | None
    stops: tuple[int, ...]
    """Stop token ids for the engine, the usual one first."""
    opening: list[TemplateMessage]
    """The candidate's messages before the turn, as template messages."""
    call_text: str = ""
    """A call as the template renders it, from its name on; empty if it shows none."""
    switches: Switches | None = None
    layouts: Layouts | None = None
    """What the template writes around new content; None to render every delta."""

    @classmethod
    def of(cls, rendering: Rendering, encoder: ContentSafeEncoder, candidate: Candidate) -> DeltaSource:
        """Learn how turns end in the candidate's conversation.

        Raises:
            TemplateError: The template refuses that conversation, or no control token ends its turns.
        """
        answers, calls, inner, call_text = _learn_endings(rendering, encoder, candidate)
        stops = stops_of([answers, *([calls] if calls is not None else [])], inner)
        opening = template_messages(candidate.before, candidate.system, message_format=rendering.message_format)
        layouts = Layouts() if encoder.inert and not encoder.strips_blanks else None
        return cls(rendering, encoder, candidate, answers, calls, stops, opening, call_text, layouts=layouts)

    def delta(
        self,
        answer: Message,
        new: Messages,
        last_output_id: int | None,
        opened: Opened | OpenTags = Opened.MESSAGE,
        tools: Sequence[ToolSpec] | None = None,
        history: Messages | None = None,
        system: str | None = None,
    ) -> EncodedText:
        """Return the tokens of a delta; see `ChatTemplate.delta`."""
        stand_in = self._stand_in(answer, new, tools, history, system)
        encoded, ending = self._encoded(stand_in), stand_in.ending
        if opened == Opened.CALL and (tags := spelled_tags(_spoken(answer), self.call_text)).closers:
            opened = tags
        if isinstance(opened, OpenTags):
            missing = np.concatenate([self._closers(opened), ending.missing(last_output_id, Opened.MESSAGE)])
        else:
            missing = ending.missing(last_output_id, opened, self.encoder.control_ids)
        if not missing.size and not ending.openers:
            return encoded
        if len(encoded.ids) and last_output_id == encoded.ids[0] and last_output_id in self.encoder.control_ids:
            return EncodedText(encoded.ids[1:], encoded.provenance[1:], encoded.text)
        inserted = np.full(len(missing), Provenance.INSERTED, np.uint8)
        ids, provenance = np.concatenate([missing, encoded.ids]), np.concatenate([inserted, encoded.provenance])
        return EncodedText(ids, provenance, encoded.text)

    def _closers(self, opened: OpenTags) -> TokenIds:
        """Return the ids of closing tags, with the template's blanks before each, without what the policy has begun.

        It has not written the whole of the first, or it were closed: Gemma 4 opens and closes a string with one tag.
        """
        text, first = "", 0
        for tag in opened.closers:
            before = self.call_text[: max(0, self.call_text.rfind(tag))]
            text += before[len(before.rstrip()) :] + tag
            first = first or len(text)
        controls = self.encoder.controls(Traced.of(text, ()))
        cuts = (at for at in range(first - 1, 0, -1) if not any(start < at < stop for start, stop, _ in controls))
        sampled = next((at for at in cuts if opened.text.endswith(text[:at])), 0)
        return self.encoder.encode(Traced.of(text[sampled:], ())).ids

    def tail(
        self,
        answer: Message,
        new: Messages,
        tools: Sequence[ToolSpec] | None = None,
        history: Messages | None = None,
        system: str | None = None,
    ) -> Tail:
        """Render a minimal conversation around the answer's calls and locate the end of the answer.

        Args:
            answer: The assistant message as Strands stores it; some templates quote its calls in the results.
            new: The messages after it.
            tools: The rollout's tools, for a candidate that renders them.
            history: Messages before the answer, for a candidate that depends on them or a template with switch words.
            system: The rollout's system prompt, for a template with switch words.

        Raises:
            TemplateError: The template refuses the messages, or `tools` or `history` is needed.
        """
        return self._rendered(self._stand_in(answer, new, tools, history, system))

    def _encoded(self, stand_in: _StandIn) -> EncodedText:
        """Return the tokens after the answer, from a layout if there is one for messages of this shape."""
        layouts, message_format = self.layouts, self.rendering.message_format
        shape = shape_of(stand_in.turn, message_format) if layouts is not None and stand_in.is_fixed else None
        if layouts is not None and shape is not None and (filled := layouts.fill(shape)) is not None:
            return filled
        tail = self._rendered(stand_in)
        encoded = self.encoder.encode(tail.text, tail.start, tail.controls)
        if layouts is not None and shape is not None and layouts.takes(shape):
            locate = partial(self._located, source=stand_in.first, ending=stand_in.ending)
            messages = stand_in.opening, stand_in.turn, stand_in.first
            specs = template_tools(stand_in.specs)
            layouts.keep(shape, learn_layout(self.rendering, self.encoder, shape[1], messages, specs, locate, encoded))
        return encoded

    def _rendered(self, stand_in: _StandIn) -> Tail:
        opening, turn, first, specs, ending, _ = stand_in
        translated = template_messages(turn, first=first, message_format=self.rendering.message_format)

        def show(messages: list[TemplateMessage]) -> Tail:
            return self._located(self.rendering.of_translated(messages, template_tools(specs)), first, ending)

        return self.rendering.shown([*opening, *translated], show)

    def _located(self, text: Traced, source: int, ending: Ending) -> Tail:
        """Find the end of the answer `source` in a rendering."""
        controls = self.encoder.controls(text)
        start = content_start(text, source)
        later = [begin for begin, _, origin in text.spans if origin > source and begin >= start]
        until = min(later, default=len(text))
        if ending.closing:
            run = find_run(controls, ending.closing, start)
            ends = [run[1]] if run is not None and run[1] <= until else []
        else:
            ends = [begin for begin, _, token in controls if start <= begin < until and token in ending.openers][:1]
        if ends:
            return Tail(text, ends[0], [control for control in controls if control[0] >= ends[0]], ending)
        tokens = [text for text, token in self.encoder.added.items() if token in (ending.closing or ending.openers)]
        raise TemplateError(
            f"The chat template does not end this answer with {' '.join(map(repr, tokens))}, as it ends others, so no "
            "message can follow it. Use a template that ends each answer with the same control token."
        )

    def _stand_in(
        self,
        answer: Message,
        new: Messages,
        tools: Sequence[ToolSpec] | None,
        history: Messages | None,
        system: str | None,
    ) -> _StandIn:
        """Return a minimal conversation around the answer's calls; arguments and errors as `tail`."""
        uses: list[ContentBlock] = [block for block in answer["content"] if "toolUse" in block]
        self._check_inputs(tools, history)
        candidate = self.candidate
        before, opening = candidate.before, self.opening
        specs: Any = {"none": None, "ours": [LOOK], "rollout": tools}[candidate.tools]
        text = candidate.remark if uses else "."
        if candidate.before_after_results is not None and _has_results(history):
            before = candidate.before_after_results
        if candidate.mirrors_history:
            before = [_mirror(message) for message in history or ()]
        keeps_system = False
        if self.switches is not None:
            keeps_system = self.switches.in_system(system)
            if needed := self.switches.needed(history or [], answer):
                before, specs, keeps_system = (history or [])[:needed], tools, True
                if self.switches.in_message({"role": "assistant", "content": [{"text": _spoken(answer)}]}):
                    text = _spoken(answer)
        is_fixed = not keeps_system and before is candidate.before
        if not is_fixed:
            prompt = system if keeps_system else candidate.system
            opening = template_messages(before, prompt, message_format=self.rendering.message_format)
        stand_in: Message = {"role": "assistant", "content": [{"text": text}, *uses] if text else uses}
        ending = self.calls if uses and self.calls is not None else self.answers
        is_fixed = is_fixed and candidate.tools != "rollout"
        return _StandIn(opening, [stand_in, *new], len(before), specs, ending, is_fixed)

    def _check_inputs(self, tools: Sequence[ToolSpec] | None, history: Messages | None) -> None:
        looks_back = self.candidate.mirrors_history or self.candidate.before_after_results or self.switches is not None
        for needed, name in ((self.candidate.tools == "rollout", "tool_specs"), (looks_back, "history")):
            if needed and {"tool_specs": tools, "history": history}[name] is None:
                raise TemplateError(
                    f"The chat template's delta is rendered {self.candidate.name}: pass {name}=..., "
                    "an empty list if there are none."
                )


def _learn_endings(
    rendering: Rendering, encoder: ContentSafeEncoder, candidate: Candidate
) -> tuple[Ending, Ending | None, frozenset[int], str]:
    """Learn how turns end in a candidate's conversation.

    Returns:
        How answers end; how calls end, or None if the template shows none; the ids that end only a part of a turn; and
        the text of a call, from its name on.

    Raises:
        TemplateError: As `DeltaSource.of`.
    """
    specs = [LOOK] if candidate.tools == "ours" else rendering.default_tools

    def render(turn: Message, *new: Message) -> Traced:
        history = [*candidate.before, turn, *new]
        return rendering.of_messages(history, candidate.system, specs, generation_prompt=bool(new))

    def try_render(*messages: Message) -> list[Traced]:
        try:
            return [render(*messages)]
        except TemplateError:
            return []

    source = len(candidate.before)
    thought, thought_call = assistant_message("", THOUGHT), call_message(_LOOK_CALL, thought=THOUGHT)
    thoughts = [*try_render(thought, _QUESTION), *try_render(thought), *try_render(thought_call)]
    in_parts = [*try_render(assistant_message(".", THOUGHT)), *try_render(thought_call)]
    inner = inner_controls(encoder, [(text, source) for text in in_parts])
    answers = learn_answers(Sample(encoder, render(_ANSWER), render(_ANSWER, _QUESTION), source), thoughts, inner)
    if answers is None:
        raise TemplateError(
            "Unsupported chat template: no control token ends its assistant turns. Use one that ends them with a "
            "control token, such as the tokenizer's eos_token."
        )
    calls, call_text = None, ""
    if (alone := try_render(_CALL)) and (followed := try_render(_CALL, _RESULT)):
        calls = learn_calls(Sample(encoder, alone[0], followed[0], source), answers)
        call_text = str.__str__(alone[0])[content_start(alone[0], source) :]
    if calls is not None:
        answers, calls = share_closers(answers, calls)
    if not answers.stops - inner:
        answers = _ended_by_eos(answers, encoder, inner)
    return answers, calls, inner, call_text


def _ended_by_eos(answers: Ending, encoder: ContentSafeEncoder, inner: frozenset[int]) -> Ending:
    """Return an ending whose closer also closes reasoning (Solar), so that only the end of sequence ends the turn.

    Raises:
        TemplateError: The tokenizer has no other eos_token.
    """
    if encoder.eos_id is None or encoder.eos_id in inner:
        raise TemplateError(
            "Each control token that ends an answer of this chat template also ends its reasoning, and the tokenizer "
            "has no other eos_token. Set tokenizer.eos_token to the token that ends a turn."
        )
    return replace(answers, finals=frozenset({encoder.eos_id}))


def _mirror(message: Message) -> Message:
    """Return a message with the same block kinds, ids and names, and short texts."""
    blocks: list[Any] = []
    for block in message["content"]:
        if "toolUse" in block:
            blocks.append({"toolUse": {**block["toolUse"], "input": _LOOK_CALL[1]}})
        elif "toolResult" in block:
            blocks.append({"toolResult": {**block["toolResult"], "content": [{"text": "."}]}})
        elif "reasoningContent" in block:
            blocks.append({"reasoningContent": {"reasoningText": {"text": THOUGHT}}})
        elif "image" in block:
            blocks.append(block)
        elif "text" in block:
            blocks.append({"text": "." if block["text"].strip() else ""})
    return {"role": message["role"], "content": blocks}


def _spoken(answer: Message) -> str:
    return "\n".join(block["text"] for block in answer["content"] if "text" in block)


def _has_results(history: Messages | None) -> bool:
    return any("toolResult" in block for message in history or () for block in message["content"])
