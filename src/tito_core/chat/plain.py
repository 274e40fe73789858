"""A copy of a tokenizer in which no text spells a control token."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

_MARKUP = re.compile(
    r"<[|｜].*>|<.*[|｜]>|\[/?[A-Z_]+\]|</?(?:think|thought|reasoning|tools?|tool_\w+|function|parameter|arg_\w+)[ =]?>",
    re.DOTALL,
)
"""Added tokens of these forms are control tokens whatever their flags say: parsers read them as markup."""


@dataclass(frozen=True, slots=True)
class PlainTokenizer:
    """A tokenizer that reads all text as ordinary text.

    Control tokens are the added ones that are flagged special, that the template's own text spells, or that have the
    form of markup, such as `<|...|>` and `<think>`. The other added tokens (Gemma's `<table>`) are ordinary, and text spells them as it always did.

    Attributes:
        tokenizer: The copy; the specials that its post-processor would put around are gone too.
        control: Texts of the control tokens.
        digest: sha256 of the original's definition, hex.
    """

    tokenizer: Tokenizer
    control: frozenset[str]
    digest: str

    @classmethod
    def of(cls, backend: Tokenizer, template: str, markup: Collection[str] = ()) -> PlainTokenizer:
        """Copy a tokenizer.

        Control tokens that are pieces of the model's own vocabulary are renamed there, because some models (Unigram,
        BPE that looks words up whole) would find them in any text.

        Args:
            backend: The tokenizer.
            template: Source of the chat template.
            markup: What else a parser reads as control tokens.
        """
        text = backend.to_str()
        definition = json.loads(text)
        added = backend.get_added_tokens_decoder().values()
        control = frozenset(
            token.content for token in added if token.content in markup or _is_control(token, template)
        )
        # Names that nobody can spell; the tokens stay in their places, so that the others keep their ids.
        secret = uuid.uuid4().hex
        names = {piece: f"{secret}{piece}" for piece in control}
        _rename(definition["model"], names)
        if len(control) == len(added):
            definition["added_tokens"] = []
        for token in definition["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        definition["post_processor"] = None
        definition["truncation"] = definition["padding"] = None
        # A stretch follows a control token, and the "first" scheme puts its blank at the start of the whole text only.
        plain = json.dumps(definition).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        return cls(Tokenizer.from_str(plain), control, hashlib.sha256(text.encode()).hexdigest())


def _is_control(token: AddedToken, template: str) -> bool:
    written = token.content in template and not token.content.isspace()
    return token.special or written or _MARKUP.fullmatch(token.content) is not None


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Give pieces of the vocabulary their new names."""
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        return
    model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [(a, b) for a, b in model["merges"] if not ({a, b, a + b} & names.keys())]
