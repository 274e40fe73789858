"""A policy for scripted engines with difficult answers: calls, unusual tokens, calls in reasoning, grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from tito_conformance import sampler
from tito_conformance.testing import Completion, HashPolicy, ScriptedRequest

ANSWERS = (
    "Hello there.",
    "One, two, three and so on for ever and ever.",
    "naïve café 日本語 😀",
    "  blanks \n\n and lines\n",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    'Let me see. <tool_call>\n{"name": "look_up", "arguments": {"word": "tree"}}\n</tool_call>'
    '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>',
    '<tool_call>\n{"name": "nowhere", "arguments": {}}\n</tool_call>',
    "<think>\nHm. <tool_call>{}</tool_call>\n</think>\n\nDone.",
    "",
)
"""Its fixed answers, in the Hermes format, without the end of the turn."""


class ConformancePolicy:
    """Returns one of `ANSWERS`, or samples from a `HashPolicy`, which also scores everything. Follows grammars.

    The prompts of the sampler's check get samples only: a fixed answer does not follow the distribution.

    Args:
        tokenizer: The model's tokenizer.
        end: Id that ends a turn.
        greedily: Whether it returns `ANSWERS` at temperature 0 too, instead of the most likely tokens.
        policy: Samples and scores everything else; a `HashPolicy` of printable ASCII when None.
        varied: Whether answers depend on the whole prompt, and differ without a seed. Otherwise a replayed conversation
            gets the same ones.
    """

    def __init__(
        self,
        tokenizer: Any,
        end: int,
        *,
        greedily: bool = False,
        policy: HashPolicy | None = None,
        varied: bool = False,
    ) -> None:
        self._varied = varied
        self._tokenizer = tokenizer
        self._end = end
        alphabet = tokenizer.encode("".join(map(chr, range(32, 127))) * 2, add_special_tokens=False)
        words = tokenizer.encode(" ".join(ANSWERS[:3]), add_special_tokens=False)
        self._greedily = greedily
        self._alphabet = sorted({*alphabet, *words})
        self._policy = policy or self._weights()

    def __call__(self, request: ScriptedRequest) -> Completion:
        """Answer one request."""
        if any(question in self._tokenizer.decode(request.prompt_ids[-80:]) for question in sampler.QUESTIONS):
            return self._policy(request)
        varied = request.number if self._varied and request.seed is None and request.temperature > 0 else None
        draw = Random(str((request.prompt_ids[-40:], request.seed, varied)))
        if request.seed is None:
            request = replace(request, seed=draw.getrandbits(62))
        if request.grammar is not None:
            ids = self._ids(write(request.grammar, draw, self._tokenizer.decode))
            return Completion([*ids, self._end])
        plain = (request.temperature > 0 or self._greedily) and not (
            request.top_k or request.top_p < 1 or request.min_p
        )
        if not plain or request.ignore_eos or request.scoring or request.min_new_tokens or draw.random() < 0.4:
            return self._policy(request)
        ids = self._ids(draw.choice(ANSWERS))
        if ids and draw.random() < 0.2:  # other ids of the same text than the tokenizer's
            at = draw.randrange(len(ids))
            pieces = [self._ids(letter) for letter in self._tokenizer.decode([ids[at]])]
            if all(len(piece) == 1 for piece in pieces):
                ids[at : at + 1] = [piece[0] for piece in pieces]
        return Completion([*ids, self._end][: request.max_new_tokens])

    def with_weights(self, **settings: Any) -> ConformancePolicy:
        """Return a policy with the same fixed answers and other weights: settings of a `HashPolicy`."""
        weights = self._weights(**settings)
        return ConformancePolicy(
            self._tokenizer, self._end, greedily=self._greedily, policy=weights, varied=self._varied
        )

    def _weights(self, **settings: Any) -> HashPolicy:
        own = {"alphabet": self._alphabet, "eos_ids": [self._end], "whole": self._varied}
        return HashPolicy(len(self._tokenizer), **{**own, **settings})

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """See `Scorer`."""
        return self._policy.score(ids, start, temperature)

    def top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        """See `Scorer`."""
        return self._policy.top(ids, position, k, temperature)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


Decode = Callable[[list[int]], str]


def write(grammar: Any, draw: Random, decode: Decode) -> str:
    """Return a text that matches a grammar: a JSON schema, or a structural tag as our parsers write them.

    Args:
        grammar: The grammar.
        draw: Chooses among its texts.
        decode: Returns the text of a control token, which the tokenizer encodes as that token again.
    """
    if isinstance(grammar, dict) and len(grammar) == 1 and not {"type", "format"} & set(grammar):
        [(kind, value)] = grammar.items()
        return _write_kind(kind, value, draw, decode)
    return _write_kind("structural_tag", grammar, draw, decode)


def _write_kind(kind: str, value: Any, draw: Random, decode: Decode) -> str:
    """Return a text that matches a grammar of a kind."""
    read = json.loads(value) if isinstance(value, str) else value
    if kind in ("json", "json_schema"):
        return json.dumps(_value(read, read, draw))
    return _format(read.get("format", read), draw, decode)


def _format(form: Any, draw: Random, decode: Decode) -> str:
    kind = form["type"]
    if kind == "const_string":
        return str(form["value"])
    if kind in ("sequence", "or"):
        parts = form["elements"]
        chosen = [draw.choice(parts)] if kind == "or" else parts
        return "".join(_format(part, draw, decode) for part in chosen)
    if kind == "json_schema":
        return json.dumps(_value(form["json_schema"], form["json_schema"], draw))
    if kind == "tag":
        begin, end = form["begin"], form["end"]
        inner = _format(form["content"], draw, decode)
        return _text(begin, decode) + inner + _text(end, decode)
    if kind == "token":
        return _text(form, decode)
    raise ValueError(f"The scripted policy does not support the format {kind!r}.")


def _text(part: Any, decode: Decode) -> str:
    if isinstance(part, dict) and isinstance(part.get("token"), int):
        return decode([part["token"]])
    if isinstance(part, dict):
        return str(part.get("token", part.get("value", "")))
    return str(part[0] if isinstance(part, list) else part)


def _value(schema: Any, root: Any, draw: Random) -> Any:
    if "$ref" in schema:
        found = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            found = found[name]
        return _value(found, root, draw)
    if "enum" in schema:
        return draw.choice(schema["enum"])
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: _value(of, root, draw) for name, of in schema.get("properties", {}).items()}
    if kind == "array":
        return [_value(schema.get("items", {"type": "string"}), root, draw)]
    plain = {"integer": draw.randrange(10), "number": 1.5, "boolean": True, "null": None}
    return plain.get(kind, "tree")
