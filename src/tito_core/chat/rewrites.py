"""Find what a template does with reasoning, and where it renders earlier messages differently from the first time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from strands.types.content import Message, Messages

from tito_core.chat.certificate import Thinking
from tito_core.chat.ending import content_spans
from tito_core.chat.probes import TOOLS, assistant_message, call_message, result_message, user_message
from tito_core.chat.rendering import Rendering, TemplateError

_THOUGHT = "Hmmm"
_DATES = (datetime(2001, 2, 3, 4, 5), datetime(2012, 11, 10, 9, 8))
_SECOND = "the second"
_LOOK_CALL = ("look", {"at": "the door"})
_QUESTION, _NEXT_QUESTION, _ANSWER = user_message("Why?"), user_message("And?"), assistant_message()
_REASONED_ANSWER, _CALL = assistant_message(thought=_THOUGHT), call_message(_LOOK_CALL, thought=_THOUGHT)
_RESULT = result_message([{"text": "Open."}])
_TWO_CALLS = call_message(_LOOK_CALL, ("find", {"it": _SECOND}))


def thinking(rendering: Rendering) -> Thinking:
    """Return what the template does with the reasoning of earlier answers."""
    if _shows(rendering, [_QUESTION, _REASONED_ANSWER, _NEXT_QUESTION]):
        return Thinking.KEPT
    if _shows(rendering, [_QUESTION, _CALL, _RESULT]):
        return Thinking.STRIPPED
    if any(_shows(rendering, [_QUESTION, turn], generation_prompt=False) for turn in (_REASONED_ANSWER, _CALL)):
        return Thinking.ALWAYS_STRIPPED
    return Thinking.NOT_SHOWN


def rewrites(source: str, variables: Mapping[str, Any], rendering: Rendering, *, tools: bool) -> Iterator[str]:
    """Yield a description of each rewrite by the template.

    Args:
        source: Source of the template.
        variables: The template's arguments.
        rendering: The compiled template.
        tools: Whether the template shows calls and results.
    """
    if tools:
        yield "calls: a call in the history is rebuilt from its parsed arguments"
        if rendering.message_format.arguments == "mapping" and _collapses_calls(rendering):
            yield "calls: of several calls in one message only the first is shown"
    if not _begins_with_prompt(rendering):
        yield "prompt: what it writes at the end of a prompt is not what it writes before the answer in the history"
    if "strftime_now" in source and _is_dated(source, variables):  # skip compiling it twice if not needed
        yield "date: the prompt holds the day or time, frozen for as long as the template lives"
    if tools and _until_first_question(rendering) != _until_first_question(rendering, _ANSWER, _NEXT_QUESTION):
        yield "tools: they are written elsewhere once more messages follow"


def _is_dated(source: str, variables: Mapping[str, Any]) -> bool:
    dated = (Rendering.of(source, variables, now) for now in _DATES)
    return str.__ne__(*(rendering.of_messages([_QUESTION], tool_specs=rendering.default_tools) for rendering in dated))


def _shows(rendering: Rendering, messages: Messages, *, generation_prompt: bool = True) -> bool:
    try:
        return _THOUGHT in rendering.of_messages(messages, tool_specs=TOOLS, generation_prompt=generation_prompt)
    except TemplateError:
        return False


def _begins_with_prompt(rendering: Rendering) -> bool:
    tools = rendering.default_tools
    prompt = rendering.of_messages([_QUESTION], tool_specs=tools)
    return str.startswith(rendering.of_messages([_QUESTION, _ANSWER, _NEXT_QUESTION], tool_specs=tools), prompt)


def _until_first_question(rendering: Rendering, *later: Message) -> str:
    text = rendering.of_messages([_QUESTION, *later], tool_specs=TOOLS)
    return str.__getitem__(text, slice(0, content_spans(text, 0)[-1][1]))


def _collapses_calls(rendering: Rendering) -> bool:
    try:
        text = rendering.of_messages([_QUESTION, _TWO_CALLS], tool_specs=TOOLS, generation_prompt=False)
    except TemplateError:
        return False
    return _SECOND not in text
