"""A copy of a tokenizer in which no text spells a control token."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Tokenizer

from tito_core.chat.words import Words

_MARKUP = re.compile(
    r"<[|｜].*>|<.*[|｜]>|｜.*｜|\[/?[A-Z_]+\]|"
    r"</?(?:think|thought|reasoning|tools?|tool_\w+|function|parameter|arg_\w+)[ =]?>",
    re.DOTALL,
)
"""Added tokens of these forms are control tokens whatever their flags say: parsers read them as markup."""


@dataclass(frozen=True, slots=True)
class PlainTokenizer:
    """A tokenizer that reads all text as ordinary text.

    Control tokens are the added ones that are flagged special, that the template's own text spells, or that have the
    form of markup, such as `<|...|>` and `<think>`. The other added tokens (Gemma's `<table>`) are ordinary, and text
    spells them as it always did.

    Attributes:
        tokenizer: The copy; the specials that its post-processor would put around are gone too.
        words: The copy's words, where it works word by word.
        control: Texts of the control tokens.
        digest: sha256 of the original's definition, hex.
    """

    tokenizer: Tokenizer
    words: Words | None
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
        digest = hashlib.sha256(text.encode()).hexdigest()
        added = backend.get_added_tokens_decoder().values()
        control = frozenset(token.content for token in added if token.content in markup or _is_control(token, template))
        made = _copies.setdefault(backend, {})
        if (digest, control) not in made:
            copy = _copy(text, control, {token.content for token in added}, backend)
            made[digest, control] = copy, Words.of(copy)
        return cls(*made[digest, control], control, digest)


_Copies = dict[tuple[str, frozenset[str]], tuple[Tokenizer, Words | None]]
_copies: WeakKeyDictionary[Tokenizer, _Copies] = WeakKeyDictionary()
"""Copies of tokenizers that are in use: one takes a second and some tens of megabytes."""


def _copy(text: str, control: frozenset[str], added: set[str], backend: Tokenizer) -> Tokenizer:
    # The model is most of a definition, and last in it: it is taken apart only where it must change.
    head, model = text[: (at := text.index('"model":{'))] + '"model":null}', text[at + len('"model":') : -1]
    definition = json.loads(head)
    # Names that nobody can spell; the tokens stay in their places, so that the others keep their ids.
    secret = uuid.uuid4().hex
    names = {piece: f"{secret}{piece}" for piece in control}
    if any(backend.model.token_to_id(piece) is not None for piece in control):
        parsed = json.loads(model)
        _rename(parsed, names)
        model = json.dumps(parsed)
    if control == added:
        definition["added_tokens"] = []
    for token in definition["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    del definition["model"]
    definition["post_processor"] = None
    definition["truncation"] = definition["padding"] = None
    # A stretch follows a control token, and the "first" scheme puts its blank at the start of the whole text only.
    plain = json.dumps(definition).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    return Tokenizer.from_str(f'{plain[:-1]}, "model": {model}}}')


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
