"""A compiled chat template with its arguments: Strands messages in, traced text out.

The message format of a template is found by trying, because templates do not declare it.
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
    """The chat template is missing, not supported, or refuses the messages."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Renders messages. Build it with `Rendering.of`; immutable.

    Attributes:
        variables: The tokenizer's special tokens and the template arguments, fixed for a rollout.
        message_format: The format of the messages that the template reads.
        default_tools: Tools for renderings of our own: empty, unless the template requires some.
        now: The time for `strftime_now`.
    """

    compiled: Any
    variables: Mapping[str, Any]
    message_format: MessageFormat
    default_tools: tuple[ToolSpec, ...]
    now: datetime

    @classmethod
    def of(cls, source: str, variables: Mapping[str, Any], now: datetime | None = None) -> Rendering:
        """Compile a template and find its message format. `now` is the time for `strftime_now`.

        Raises:
            TemplateError: The source is not valid Jinja.
        """
        now = now or datetime.now()
        try:
            compiled = compile_template(source, now)
        except TemplateSyntaxError as error:
            raise TemplateError(f"The chat template is not valid Jinja: {error} (line {error.lineno}).") from error
        default: tuple[ToolSpec, ...] = () if _accepts_tools(compiled, variables, ()) else (LOOK,)
        render = partial(_run, compiled, variables, template_tools(default), False)
        return cls(compiled, variables, find_message_format(render), default, now)

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
            TemplateError: The template refuses the messages or drops one of them.
            UnsupportedContentError: A block cannot become text.
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
        except Exception as error:  # a template may raise any exception
            reason = str(error).rstrip(".")
            raise TemplateError(
                f"The chat template refused messages with roles {_roles(messages)}: {reason}."
            ) from error
        shown = {origin for _, _, origin in text.spans}
        for position, message in enumerate(messages):
            if not _is_shown(message, shown):
                raise TemplateError(
                    f"The chat template leaves out message {position} of messages with roles {_roles(messages)}. Use a "
                    f"template that renders the role {message['role']!r}."
                )
        return text


def _is_shown(message: TemplateMessage, shown: set[int]) -> bool:
    """Return whether a rendering shows a message, or the message is blank."""
    # A template that strips reasoning may show no text of an answer, so only its calls count.
    content = message.get("tool_calls") if message["role"] == "assistant" else message["content"]
    name = content[0]["function"]["name"] if message["role"] == "assistant" and content else content
    if isinstance(name, Traced) and name.spans and name.spans[0][2] in shown:  # fast path
        return True
    if isinstance(content, str):
        content = content.strip()
    elif message["role"] != "assistant":  # content in parts
        content = [part for part in content or () if part.get("text", "").strip()]
    return not content or not shown.isdisjoint({UNKNOWN, *sources(content)})


def _accepts_tools(compiled: Any, variables: Mapping[str, Any], tools: tuple[ToolSpec, ...]) -> bool:
    """Return whether the template renders a question with these tools, or refuses it with the probe tool too."""
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
"""Renders template messages; raises any exception of the template."""
_USER, _ASSISTANT, _REASONING = 0, 1, 2


def find_message_format(render: Render) -> MessageFormat:
    """Find the message format of a template by trying; options that make no difference keep their default."""
    strings, parts = MessageFormat(), MessageFormat(parts=True)
    shows_parts_only = not _shows(render, [_user_message(strings)]) and _shows(render, [_user_message(parts)])
    message_format = parts if shows_parts_only else strings
    if not _accepts_calls(render, message_format):
        short_ids = replace(message_format, short_ids=True)
        message_format = short_ids if _accepts_calls(render, short_ids) else message_format
    if not _reads_mapping(render, message_format) and _reads_string(render, message_format):
        message_format = replace(message_format, arguments="string")
    for key in REASONING_KEYS:
        reasoning = {key: Traced.content("hm", _REASONING)}
        answer = {"role": "assistant", "content": message_format.content(Traced.content("so", _ASSISTANT))}
        question, call = _call_messages(message_format)
        if any(_shows(render, [question, turn | reasoning], _REASONING) for turn in (answer, call)):
            with_text = call | {"content": answer["content"]}
            takes_each = _renders(render, [question, with_text]) and _renders(render, [question, call | reasoning])
            takes_both = not takes_each or _renders(render, [question, with_text | reasoning])
            return replace(message_format, reasoning=key, text_and_reasoning=takes_both)
    return replace(message_format, reasoning=None)


def _accepts_calls(render: Render, message_format: MessageFormat) -> bool:
    """Return whether the template renders a call and its result, with arguments as a mapping or as a string."""
    for each in (message_format, replace(message_format, arguments="string")):
        question, call = _call_messages(each)
        content = each.content(Traced.content("seen", _ASSISTANT))
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "name": "look", "content": content}
        if _renders(render, [question, call, result]):
            return True
    return False


def _user_message(message_format: MessageFormat) -> TemplateMessage:
    return {"role": "user", "content": message_format.content(Traced.content("why", _USER))}


def _call_messages(message_format: MessageFormat, arguments: Any = None) -> list[TemplateMessage]:
    if arguments is None:
        arguments = '{"at": "it"}' if message_format.arguments == "string" else {"at": "it"}
    function = {"name": Traced.content("look", _ASSISTANT), "arguments": arguments}
    calls = [
        {"id": Traced.content(message_format.call_id("call_1"), _ASSISTANT), "type": "function", "function": function}
    ]
    empty = {
        "role": "assistant",
        "content": message_format.content(Traced.content("", _ASSISTANT)),
        "tool_calls": calls,
    }
    return [_user_message(message_format), empty]


def _reads_mapping(render: Render, message_format: MessageFormat) -> bool:
    """Return whether the template renders a mapping of arguments as anything but its Python `repr`."""
    content = Traced.content
    text = _try(
        render,
        _call_messages(
            message_format, {content("at", _ASSISTANT): content("it's", _ASSISTANT), content("n", _ASSISTANT): True}
        ),
    )
    return text is not None and "'at'" not in text and "\"it's\", 'n" not in text


def _reads_string(render: Render, message_format: MessageFormat) -> bool:
    text = _try(render, _call_messages(message_format, Traced.content('{"at": "it"}', _ASSISTANT)))
    return text is not None and '{"at": "it"}' in text


def _shows(render: Render, messages: Sequence[TemplateMessage], source: int = _USER) -> bool:
    text = _try(render, messages)
    return text is not None and any(origin == source for _, _, origin in text.spans)


def _renders(render: Render, messages: Sequence[TemplateMessage]) -> bool:
    return _try(render, messages) is not None


def _try(render: Render, messages: Sequence[TemplateMessage]) -> Traced | None:
    try:
        return render(messages)
    except Exception:  # a template may raise any exception
        return None
