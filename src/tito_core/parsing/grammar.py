"""The grammar that forces a tool call: a structural tag, as XGrammar reads it in vLLM and in SGLang.

A structural tag can demand a control token by its id, so that the policy cannot spell the tag out of other tokens,
which the parser would take for text (law 9). EBNF or a JSON schema alone cannot. Source of the forms: XGrammar 0.2.8,
`structural_tag.py`; vLLM 0.32 takes them as `structured_outputs.structural_tag`, SGLang 0.5.23 as `structural_tag`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tito_core.parsing.bounded import bounded_by_pattern
from tito_core.parsing.completion import JsonSchema, Tools
from tito_core.parsing.markup import Markup
from tito_core.parsing.typed_value import types_of

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
        avoided_ids: Control tokens. Where a grammar takes text, such as in a JSON string, XGrammar would let one
            through by its bytes; it must come only where nothing else may. Those that end what may go on are left out.
    """

    kind: str
    value: str
    avoided_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, grammar: Grammar, controls: Iterable[int] = ()) -> CallGrammar:
        """Wrap one format, with the control tokens of the vocabulary."""
        value = json.dumps({"type": "structural_tag", "format": grammar}, ensure_ascii=False)
        return cls("structural_tag", value, tuple(sorted(set(controls) - _enders(grammar))))


_CLOSED_TYPES = ("object", "array", "string")
"""JSON types whose text says by itself where it ends; a number may always have one more digit."""


def _enders(grammar: Grammar) -> set[int]:
    """Return the tokens that end text which could go on: with a bias against them it would never end."""
    found: set[int] = set()
    _firsts(grammar, found)
    return found


def _firsts(grammar: Grammar, enders: set[int]) -> tuple[set[int], bool]:
    """Return the tokens that a format begins with, and whether it may go on where it may end; fill `enders`."""
    kind = grammar["type"]
    if kind == "token":
        return {grammar["token"]}, False
    if kind == "const_string":
        return set(), False
    if kind == "json_schema":
        return set(), grammar["json_schema"].get("type") not in _CLOSED_TYPES
    if kind == "optional":
        return _firsts(grammar["content"], enders)[0], True
    if kind == "or":
        each = [_firsts(element, enders) for element in grammar["elements"]]
        return set().union(*(firsts for firsts, _ in each)), any(goes_on for _, goes_on in each)
    if kind != "sequence":
        return set(), True
    begins: set[int] = set()
    before = False
    for element in grammar["elements"]:
        firsts, goes_on = _firsts(element, enders)
        enders |= firsts if before else set()
        begins = begins or firsts
        before = goes_on or (before and element["type"] == "const_string")
    return begins, before


def chosen(tools: Tools, name: str | None) -> Tools:
    """Return the tools that may be called: all, or the one called `name`.

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


def arguments_json(schema: JsonSchema) -> Grammar:
    """JSON that satisfies a schema; a policy that likes blanks cannot spend the turn on them."""
    wanted = bounded_by_pattern(schema) or {"type": "object"}
    return {"type": "json_schema", "json_schema": wanted, "max_whitespace_cnt": 2}


def json_calls(tools: Tools, *, before: str = "", arguments: str = "arguments", after: str = "") -> Grammar:
    """A call of one of the tools as a JSON object, its arguments under the key `arguments`, between two texts."""
    return either(
        sequence(
            text(f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments}": '),
            arguments_json(schema),
            text("}" + after),
        )
        for name, schema in tools.items()
    )


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


@dataclass(frozen=True, slots=True)
class Parameters:
    """How a format writes the parameters of a call one by one.

    Attributes:
        head: What comes before the value, by the parameter's name and whether its value stands as plain text.
        end: The tag or text after the value.
        after: What is written after that.
        anchor: The control token in both, if they hold one.
    """

    head: Callable[[str, bool], Grammar]
    end: str
    after: str = ""
    anchor: str = ""

    def of(self, markup: Markup, schema: JsonSchema) -> list[Grammar]:
        """Return every parameter that a tool's schema names, in its order; those not required may be left out."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        written = ((key, self._one(markup, key, one, schema)) for key, one in properties.items())
        return [one if key in required else {"type": "optional", "content": one} for key, one in written]

    def _one(self, markup: Markup, key: str, schema: JsonSchema, whole: JsonSchema) -> Grammar:
        types = types_of(schema, whole)
        plain = types is None or "string" in types
        close = anchored(markup, self.end, self.anchor) if self.anchor else tag(markup, self.end)
        after = [text(self.after)] if self.after else []
        if not plain:
            definitions = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
            return sequence(self.head(key, False), arguments_json({**schema, **definitions}), close, *after)
        if isinstance(options := schema.get("enum"), list) and options:
            values = either(text(str(option)) for option in options)
            return sequence(self.head(key, True), values, close, *after)
        if close["type"] == "const_string":
            excluded = {"type": "any_text", "excludes": list(markup.texts)}
            value: Grammar = {"type": "tag", "begin": "", "content": excluded, "end": self.end}
            return sequence(self.head(key, True), value, *after)
        anything = {"type": "any_tokens", "exclude_tokens": sorted(markup.controls)}
        return sequence(self.head(key, True), anything, close, *after)


def after_reasoning(markup: Markup, close: str, grammar: Grammar) -> Grammar:
    """Reasoning that the prompt has opened, its closing tag, and then `grammar`."""
    token = markup.token_of(close)
    blank: Grammar = {"type": "optional", "content": text("\n\n")}
    if token is None:
        thought: Grammar = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": close}
        return sequence(thought, blank, grammar)
    thinking = {"type": "any_tokens", "exclude_tokens": sorted({token, *markup.special})}
    return sequence(thinking, tag(markup, close), blank, grammar)
