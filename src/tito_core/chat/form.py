"""The form in which a template family reads messages: found by trying, because templates do not say."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tito_core.chat.traced import Traced

Arguments = Literal["mapping", "string"]
TemplateMessage = dict[str, Any]
Render = Callable[[Sequence[TemplateMessage]], Traced]
"""Renders template messages; raises whatever the template raises."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Under which key templates read reasoning: most, gpt-oss, and some that take either."""
_ASKED, _CALLED, _THOUGHT = 0, 1, 2
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class Form:
    """How Strands content is written into template messages.

    Attributes:
        arguments: Whether a call's arguments are a mapping (most families) or its JSON (DeepSeek-V3).
        reasoning: Key of an answer's reasoning, or None where the template shows none.
        both: Whether calls may have text and reasoning beside them (not in gpt-oss, where the text then goes alone).
        parts: Whether content is a list of `{"type": "text"}` parts, which some image models' templates demand.
        short_ids: Whether call ids are nine letters or digits, which Mistral's templates demand.
    """

    arguments: Arguments = "mapping"
    reasoning: str | None = REASONING_KEYS[0]
    both: bool = True
    parts: bool = False
    short_ids: bool = False

    def call_id(self, sampled: str) -> str:
        """Return a call's id as the template reads it: the policy's own, or a digest where it has no such form."""
        if not self.short_ids or _SHORT_ID.fullmatch(sampled):
            return sampled
        return hashlib.sha256(sampled.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    def content(self, text: str) -> Any:
        """Give a message's text as the template reads it."""
        return [{"type": "text", "text": text}] if self.parts else text


def find_form(render: Render) -> Form:
    """Try what a template takes, each time the usual first; what nothing changes stays as usual."""
    parts = not _shows(render, [_asked(Form())]) and _shows(render, [_asked(Form(parts=True))])
    form = Form(parts=parts)
    if not any(_takes_calls(render, each) for each in (form, replace(form, arguments="string"))):
        short = replace(form, short_ids=True)
        form = (
            short if any(_takes_calls(render, each) for each in (short, replace(short, arguments="string"))) else form
        )
    if not _reads_mapping(render, form) and _reads_string(render, form):
        form = replace(form, arguments="string")
    for key in REASONING_KEYS:
        thought = {key: Traced.content("hm", _THOUGHT)}
        answer = {"role": "assistant", "content": form.content(Traced.content("so", _CALLED))}
        asked, called = _called(form, '{"at": "it"}' if form.arguments == "string" else {"at": "it"})
        if any(_shows(render, [asked, turn | thought], _THOUGHT) for turn in (answer, called)):
            with_text = called | {"content": answer["content"]}
            either = (
                _try(render, [asked, with_text]) is not None and _try(render, [asked, called | thought]) is not None
            )
            both = not either or _try(render, [asked, with_text | thought]) is not None
            return replace(form, reasoning=key, both=both)
    return replace(form, reasoning=None)


def _takes_calls(render: Render, form: Form) -> bool:
    """Return whether a call and its result are rendered at all."""
    asked, called = _called(form, '{"at": "it"}' if form.arguments == "string" else {"at": "it"})
    content = form.content(Traced.content("seen", _CALLED))
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "name": "look", "content": content}
    return _try(render, [asked, called, result]) is not None


def _asked(form: Form) -> TemplateMessage:
    return {"role": "user", "content": form.content(Traced.content("why", _ASKED))}


def _called(form: Form, arguments: Any) -> list[TemplateMessage]:
    function = {"name": Traced.content("look", _CALLED), "arguments": arguments}
    calls = [{"id": Traced.content(form.call_id("call_1"), _CALLED), "type": "function", "function": function}]
    empty = {"role": "assistant", "content": form.content(Traced.content("", _CALLED)), "tool_calls": calls}
    return [_asked(form), empty]


def _reads_mapping(render: Render, form: Form) -> bool:
    """Tell whether a mapping of arguments is written as anything but Python's own notation for it."""
    content = Traced.content
    text = _try(render, _called(form, {content("at", _CALLED): content("it's", _CALLED), content("n", _CALLED): True}))
    return text is not None and "'at'" not in text and "\"it's\", 'n" not in text


def _reads_string(render: Render, form: Form) -> bool:
    text = _try(render, _called(form, Traced.content('{"at": "it"}', _CALLED)))
    return text is not None and '{"at": "it"}' in text


def _shows(render: Render, messages: Sequence[TemplateMessage], source: int = _ASKED) -> bool:
    text = _try(render, messages)
    return text is not None and any(origin == source for _, _, origin in text.spans)


def _try(render: Render, messages: Sequence[TemplateMessage]) -> Traced | None:
    try:
        return render(messages)
    except Exception:  # a template is a program: what it raises on a form that it does not take is its author's
        return None
