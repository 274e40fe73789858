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
from tokenizers.models import BPE

from tito_core.chat.word_cache import WordCache

_MARKUP = re.compile(
    r"<[|｜].*>|<.*[|｜]>|｜.*｜|\[/?[A-Z_]+\]|"
    r"</?(?:think|thought|reasoning|tools?|tool_\w+|function|parameter|arg_\w+)[ =]?>",
    re.DOTALL,
)
"""Added tokens of these forms are control tokens whatever their flags say: parsers read them as markup."""


@dataclass(frozen=True, slots=True)
class InertTokenizer:
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
    words: WordCache | None
    control: frozenset[str]
    digest: str

    @classmethod
    def of(cls, backend: Tokenizer, template: str, markup: Collection[str] = ()) -> InertTokenizer:
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
            copy = _sharing(text, control, backend) or _copy(text, control, {token.content for token in added}, backend)
            made[digest, control] = copy
        return cls(*made[digest, control], control, digest)


_Copies = dict[tuple[str, frozenset[str]], tuple[Tokenizer, WordCache | None]]
_copies: WeakKeyDictionary[Tokenizer, _Copies] = WeakKeyDictionary()
"""Copies of tokenizers that are in use: one takes up to seconds and hundreds of megabytes."""
_EMPTY_MODEL = '{"type": "BPE", "vocab": {}, "merges": []}'


def _sharing(text: str, control: frozenset[str], backend: Tokenizer) -> tuple[Tokenizer, WordCache | None] | None:
    """Make a tokenizer over the very same model, in no time; None where that is not sure to be the same.

    It lacks the control tokens, and its model does not make them either, whatever text it is given.
    """
    model = backend.model
    if not isinstance(model, BPE) or any(_makes(model, piece) for piece in control):
        return None
    definition = _definition(text)
    definition["added_tokens"] = []
    made = Tokenizer.from_str(_with_model(definition, _EMPTY_MODEL))
    made.model = model
    secret = uuid.uuid4().hex
    added = sorted(backend.get_added_tokens_decoder().items())
    others = {index: token for index, token in added if token.content not in control}
    # A control token that the model has not takes its place, so that the others keep their ids.
    kept = [token for _, token in added if token.content not in control or model.token_to_id(token.content) is None]
    made.add_tokens([AddedToken(secret + t.content) if t.content in control else t for t in kept] if others else [])
    if any(made.token_to_id(token.content) != index for index, token in others.items()):
        return None
    definition["added_tokens"] = list(others)
    return made, WordCache.of(made, definition)


def _makes(model: BPE, piece: str) -> bool:
    """Return whether a model may make a token out of text.

    Merges that give a token in the midst of a text give it from that piece of the text alone too: none of them reaches
    over its ends, and the order among the rest is the same.
    """
    index = model.token_to_id(piece)
    if index is None:
        return False
    plain = not (model.ignore_merges or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
    return not plain or [token.id for token in model.tokenize(piece)] == [index]


def _definition(text: str) -> dict[str, Any]:
    """Read all of a definition but the model, which is most of it, and last in it."""
    definition: dict[str, Any] = json.loads(text[: text.index('"model":{')] + '"model":null}')
    return definition


def _with_model(definition: dict[str, Any], model: str) -> str:
    """Write a definition for text between control tokens, with this model."""
    whole = {key: value for key, value in definition.items() if key != "model"}
    whole["post_processor"] = whole["truncation"] = whole["padding"] = None
    # A stretch follows a control token, and the "first" scheme puts its blank at the start of the whole text only.
    plain = json.dumps(whole).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    return f'{plain[:-1]}, "model": {model}}}'


def _copy(
    text: str, control: frozenset[str], added: set[str], backend: Tokenizer
) -> tuple[Tokenizer, WordCache | None]:
    """Copy a tokenizer with its model, in which the control tokens get names that nobody can spell."""
    definition, model = _definition(text), text[text.index('"model":{') + len('"model":') : -1]
    # The tokens stay in their places, so that the others keep their ids.
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
    copy = Tokenizer.from_str(_with_model(definition, model))
    return copy, WordCache.of(copy, definition)


def _is_control(token: AddedToken, template: str) -> bool:
    # Words such as `role` are names in the template's own code.
    written = token.content in template and not token.content.isspace() and not token.content.isidentifier()
    return token.special or written or _MARKUP.fullmatch(token.content) is not None


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename pieces of the vocabulary."""
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        return
    model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [(a, b) for a, b in model["merges"] if not ({a, b, a + b} & names.keys())]
