"""The grammar that forces a tool call: a structural tag, as XGrammar reads it in vLLM and in SGLang.

A structural tag can demand a control token by its id, so that the policy cannot spell the tag out of other tokens,
which the parser would take for text (law 9). EBNF or a JSON schema alone cannot. Source of the forms: XGrammar 0.2.8,
`structural_tag.py`; vLLM 0.32 takes them as `structured_outputs.structural_tag`, SGLang 0.5.23 as `structural_tag`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tito_core.parsing.completion import JsonSchema, Tools
from tito_core.parsing.markup import Markup

Grammar = dict[str, Any]
"""One format of a structural tag."""


class NoCallGrammarError(ValueError):
    """A call cannot be forced in this format, or not of this tool."""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A grammar that an engine can sample under.

    Attributes:
        kind: What it is; always "structural_tag".
        value: It, as JSON.
    """

    kind: str
    value: str

    @classmethod
    def of(cls, grammar: Grammar) -> CallGrammar:
        """Wrap one format."""
        return cls("structural_tag", json.dumps({"type": "structural_tag", "format": grammar}, ensure_ascii=False))


def chosen(tools: Tools, name: str | None) -> Tools:
    """Give the tools that may be called: all, or the one called `name`.

    Raises:
        NoCallGrammarError: There is none.
    """
    if not tools:
        raise NoCallGrammarError("A tool call cannot be forced: there are no tools.")
    if name is None:
        return tools
    if name not in tools:
        raise NoCallGrammarError(f"There is no tool {name!r} to force. The tools are: {', '.join(sorted(tools))}.")
    return {name: tools[name]}


def text(value: str) -> Grammar:
    """Exactly this text."""
    return {"type": "const_string", "value": value}


def tag(markup: Markup, value: str) -> Grammar:
    """Exactly this tag: its token where the vocabulary has one, else its text."""
    token = markup.token_of(value)
    return text(value) if token is None else {"type": "token", "token": token}


def either(options: Iterable[Grammar]) -> Grammar:
    """One of several."""
    elements = list(options)
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def sequence(*elements: Grammar) -> Grammar:
    """One after another."""
    return {"type": "sequence", "elements": list(elements)}


def arguments_json(schema: JsonSchema, style: str = "json") -> Grammar:
    """Arguments that satisfy a schema, as JSON or in one of XGrammar's XML styles."""
    return {"type": "json_schema", "json_schema": dict(schema) or {"type": "object"}, "style": style}


def anchored(markup: Markup, value: str, anchor: str) -> Grammar:
    """Exactly this text, in which `anchor` is its control token where the vocabulary has one."""
    token = markup.anchors.get(anchor)
    if token is None:
        return text(value)
    parts: list[Grammar] = []
    for i, part in enumerate(value.split(anchor)):
        parts += [{"type": "token", "token": token}] if i else []
        parts += [text(part)] if part else []
    return sequence(*parts)


def text_argument(markup: Markup, schema: JsonSchema, end: str, anchor: str = "") -> list[Grammar]:
    """A string without quotes, one of the schema's if it names some, and the tag or text `end` after it."""
    close = anchored(markup, end, anchor) if anchor else tag(markup, end)
    if isinstance(options := schema.get("enum"), list) and options:
        return [either(text(str(option)) for option in options), close]
    if close["type"] == "const_string":
        return [{"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}]
    return [{"type": "any_tokens", "exclude_tokens": sorted(markup.controls)}, close]


def with_definitions(schema: JsonSchema, whole: JsonSchema) -> JsonSchema:
    """Give one parameter's schema with what its references look up in the tool's."""
    return {**schema, **{key: whole[key] for key in ("$defs", "definitions") if key in whole}}


def after_reasoning(markup: Markup, close: str, grammar: Grammar) -> Grammar:
    """Reasoning that the prompt has opened, its closing tag, and then `grammar`."""
    token = markup.token_of(close)
    if token is None:
        thought: Grammar = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": close}
        return sequence(thought, grammar)
    return sequence({"type": "any_tokens", "exclude_tokens": [token]}, tag(markup, close), text("\n\n"), grammar)
