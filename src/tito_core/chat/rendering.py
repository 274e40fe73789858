"""A compiled chat template with its arguments: Strands messages in, traced text out.

The form in which a template family reads messages is found by trying, because templates do not say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import TemplateSyntaxError
from strands.types.content import Messages
from strands.types.tools import ToolSpec

from tito_core.chat.environment import compile_template, render
from tito_core.chat.messages import REASONING_KEYS, MessageFormat, TemplateMessage, template_messages, template_tools
from tito_core.chat.probes import LOOK, user_message
from tito_core.chat.traced import UNKNOWN, Traced, sources


class TemplateError(ValueError):
    """The chat template is missing, refuses the messages, or its turns cannot be told apart."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Renders messages. Build it with `Rendering.of`; immutable.

    Attributes:
        variables: The tokenizer's special tokens and the template arguments, fixed for a rollout.
        message_format: How the template's family reads messages.
        usual_tools: Tools for renderings of our own that need none: empty, but for a template that demands some.
        now: What the template is told of the time.
    """

    compiled: Any
    variables: Mapping[str, Any]
    message_format: MessageFormat
    usual_tools: tuple[ToolSpec, ...]
    now: datetime

    @classmethod
    def of(cls, source: str, variables: Mapping[str, Any], now: datetime | None = None) -> Rendering:
        """Compile a template and find the form that it reads; `now` is what it is told of the time.

        Raises:
            TemplateError: The source is no Jinja template.
        """
        now = now or datetime.now()
        try:
            compiled = compile_template(source, now)
        except TemplateSyntaxError as error:
            raise TemplateError(f"The chat template is not valid Jinja: {error} (line {error.lineno}).") from error
        usual: tuple[ToolSpec, ...] = () if _takes(compiled, variables, ()) else (LOOK,)
        render = partial(_run, compiled, variables, template_tools(usual), False)
        return cls(compiled, variables, find_message_format(render), usual, now)

    def of_messages(
        self,
        messages: Messages,
        system_prompt: str | None = None,
        tool_specs: Sequence[ToolSpec] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> Traced:
        """Render Strands messages; the trace source of each is its index.

        Raises:
            TemplateError: The template refuses the messages, or shows nothing of one of them.
            UnsupportedContentError: A block that cannot become text.
        """
        translated = template_messages(messages, system_prompt, message_format=self.message_format)
        return self.of_translated(translated, template_tools(tool_specs), generation_prompt=generation_prompt)

    def of_translated(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> Traced:
        """Render template messages, as `template_messages` makes them; raises as `of_messages`."""
        try:
            text = _run(self.compiled, self.variables, tools, generation_prompt, messages)
        except Exception as error:  # a template is a program: it raises whatever its author made it raise
            why = str(error).rstrip(".")
            raise TemplateError(f"The chat template refused messages with roles {_roles(messages)}: {why}.") from error
        shown = {origin for _, _, origin in text.spans}
        for position, message in enumerate(messages):
            if not _is_shown(message, shown):
                raise TemplateError(
                    f"The chat template leaves out message {position} of those with roles {_roles(messages)}: use one "
                    f"that renders the role {message['role']!r}."
                )
        return text


def _is_shown(message: TemplateMessage, shown: set[int]) -> bool:
    """Return whether a rendering shows anything of a message that says something."""
    # Of an answer's text a template may show nothing, where it strips reasoning.
    told = message.get("tool_calls") if message["role"] == "assistant" else message["content"]
    name = told[0]["function"]["name"] if message["role"] == "assistant" and told else told
    if isinstance(name, Traced) and name.spans and name.spans[0][2] in shown:  # the usual case, in no time
        return True
    if isinstance(told, str):
        told = told.strip()
    elif message["role"] != "assistant":  # content in parts
        told = [part for part in told or () if part["text"].strip()]
    return not told or not shown.isdisjoint({UNKNOWN, *sources(told)})


def _takes(compiled: Any, variables: Mapping[str, Any], tools: tuple[ToolSpec, ...]) -> bool:
    """Return whether the template renders a question with these tools, or with none that we could give it."""
    question = template_messages([user_message("Why?")])
    for given in (tools, (LOOK,)):
        try:
            _run(compiled, variables, template_tools(given), False, question)
        except Exception:  # as above
            continue
        return given == tools
    return True


def _run(
    compiled: Any,
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    generation_prompt: bool,
    messages: Sequence[TemplateMessage],
) -> Traced:
    return render(compiled, _values(variables, tools, generation_prompt, messages))


def _values(
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    generation_prompt: bool,
    messages: Sequence[TemplateMessage],
) -> dict[str, Any]:
    values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": generation_prompt}
    return {**variables, **values}


def _roles(messages: Sequence[TemplateMessage]) -> list[str]:
    return [message["role"] for message in messages]


Render = Callable[[Sequence[TemplateMessage]], Traced]
"""Renders template messages; raises whatever the template raises."""
_ASKED, _CALLED, _THOUGHT = 0, 1, 2


def find_message_format(render: Render) -> MessageFormat:
    """Try what a template takes, each time the usual first; what nothing changes stays as usual."""
    parts = not _shows(render, [_asked(MessageFormat())]) and _shows(render, [_asked(MessageFormat(parts=True))])
    message_format = MessageFormat(parts=parts)
    if not any(_takes_calls(render, each) for each in (message_format, replace(message_format, arguments="string"))):
        short = replace(message_format, short_ids=True)
        message_format = (
            short
            if any(_takes_calls(render, each) for each in (short, replace(short, arguments="string")))
            else message_format
        )
    if not _reads_mapping(render, message_format) and _reads_string(render, message_format):
        message_format = replace(message_format, arguments="string")
    for key in REASONING_KEYS:
        thought = {key: Traced.content("hm", _THOUGHT)}
        answer = {"role": "assistant", "content": message_format.content(Traced.content("so", _CALLED))}
        asked, called = _called(
            message_format, '{"at": "it"}' if message_format.arguments == "string" else {"at": "it"}
        )
        if any(_shows(render, [asked, turn | thought], _THOUGHT) for turn in (answer, called)):
            with_text = called | {"content": answer["content"]}
            either = (
                _try(render, [asked, with_text]) is not None and _try(render, [asked, called | thought]) is not None
            )
            both = not either or _try(render, [asked, with_text | thought]) is not None
            return replace(message_format, reasoning=key, both=both)
    return replace(message_format, reasoning=None)


def _takes_calls(render: Render, message_format: MessageFormat) -> bool:
    """Return whether a call and its result are rendered at all."""
    asked, called = _called(message_format, '{"at": "it"}' if message_format.arguments == "string" else {"at": "it"})
    content = message_format.content(Traced.content("seen", _CALLED))
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "name": "look", "content": content}
    return _try(render, [asked, called, result]) is not None


def _asked(message_format: MessageFormat) -> TemplateMessage:
    return {"role": "user", "content": message_format.content(Traced.content("why", _ASKED))}


def _called(message_format: MessageFormat, arguments: Any) -> list[TemplateMessage]:
    function = {"name": Traced.content("look", _CALLED), "arguments": arguments}
    calls = [
        {"id": Traced.content(message_format.call_id("call_1"), _CALLED), "type": "function", "function": function}
    ]
    empty = {"role": "assistant", "content": message_format.content(Traced.content("", _CALLED)), "tool_calls": calls}
    return [_asked(message_format), empty]


def _reads_mapping(render: Render, message_format: MessageFormat) -> bool:
    """Return whether a mapping of arguments is written as anything but Python's own notation for it."""
    content = Traced.content
    text = _try(
        render, _called(message_format, {content("at", _CALLED): content("it's", _CALLED), content("n", _CALLED): True})
    )
    return text is not None and "'at'" not in text and "\"it's\", 'n" not in text


def _reads_string(render: Render, message_format: MessageFormat) -> bool:
    text = _try(render, _called(message_format, Traced.content('{"at": "it"}', _CALLED)))
    return text is not None and '{"at": "it"}' in text


def _shows(render: Render, messages: Sequence[TemplateMessage], source: int = _ASKED) -> bool:
    text = _try(render, messages)
    return text is not None and any(origin == source for _, _, origin in text.spans)


def _try(render: Render, messages: Sequence[TemplateMessage]) -> Traced | None:
    try:
        return render(messages)
    except Exception:  # a template is a program: what it raises on a form that it does not take is its author's
        return None
