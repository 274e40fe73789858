"""A copy of a tokenizer that encodes no text as a control token."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from tito_core.chat.word_cache import WordCache

_MARKUP = re.compile(
    r"<[|｜].*>|<.*[|｜]>|｜.*｜|\[/?[A-Z_]+\]|"
    r"</?(?:think|thought|reasoning|tools?|tool_\w+|function|parameter|arg_\w+)[ =]?>",
    re.DOTALL,
)
"""Added tokens of these forms are control tokens whatever their flags are, because parsers read them as markup."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Copies:
    """The private copies of one tokenizer, shared by all policies with an equal one while any of them uses it.

    It exists because it can be referred to weakly: tokenizers 0.22 has no weak references to its own objects.
    """

    original: Tokenizer
    inert: dict[frozenset[str], tuple[Tokenizer, WordCache | None]] = field(default_factory=dict)


_copies: WeakValueDictionary[str, _Copies] = WeakValueDictionary()
"""Copies by digest of the definition. A copy takes up to seconds and hundreds of megabytes."""


@dataclass(frozen=True, slots=True)
class InertTokenizer:
    """A tokenizer that encodes all text as ordinary text.

    Keep it as long as its tokenizers: it holds the copies that policies share.

    Control tokens are the added tokens that are flagged special, occur in the template's source, or have the form of
    markup, such as `<|...|>` and `<think>`. Other added tokens (Gemma's `<table>`) stay ordinary text.

    Attributes:
        tokenizer: The copy, without the post-processor that adds special tokens.
        words: The cache of its words, or None if it does not encode word by word.
        control: Texts of the control tokens.
        digest: sha256 of the original's definition, hex.
    """

    tokenizer: Tokenizer
    words: WordCache | None
    control: frozenset[str]
    digest: str
    _copies: _Copies

    @property
    def original(self) -> Tokenizer:
        """The original as it was, which its owner's calls do not change.

        transformers keeps the padding and truncation of the last call in the tokenizer, which any thread may make.
        Neither is kept here.
        """
        return self._copies.original

    @classmethod
    def of(cls, backend: Tokenizer, template: str, markup: Collection[str] = ()) -> InertTokenizer:
        """Copy a tokenizer, in the state that it has now.

        Control tokens that are also in the model's vocabulary are renamed there, because some models (Unigram, BPE
        with `ignore_merges`) would find them in any text.

        Args:
            backend: The tokenizer.
            template: Source of the chat template.
            markup: Further added tokens that a parser reads as control tokens.
        """
        text = _plain(backend.to_str())
        digest = hashlib.sha256(text.encode()).hexdigest()
        if (copies := _copies.get(digest)) is None:
            copies = _copies.setdefault(digest, _Copies(Tokenizer.from_str(text)))
        original = copies.original
        added = original.get_added_tokens_decoder().values()
        control = frozenset(token.content for token in added if token.content in markup or _is_control(token, template))
        if control not in copies.inert:
            copies.inert[control] = _share_model(text, control, original) or _copy(
                text, control, {token.content for token in added}, original
            )
        return cls(*copies.inert[control], control, digest, copies)


_STATELESS = '"truncation":null,"padding":null'
"""How the definition of a tokenizer that neither truncates nor pads begins, after its version."""
_EMPTY_MODEL = '{"type": "BPE", "vocab": {}, "merges": []}'


def _plain(text: str) -> str:
    """Return a definition without padding and truncation."""
    if _STATELESS in text[:100]:
        return text
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return str(tokenizer.to_str())


def _share_model(text: str, control: frozenset[str], backend: Tokenizer) -> tuple[Tokenizer, WordCache | None] | None:
    """Return a tokenizer without control tokens that shares the model; None if that could change any encoding.

    This takes no time. The model must not produce the control tokens from any text.
    """
    model = backend.model
    if not isinstance(model, BPE) or any(_produces(model, piece) for piece in control):
        return None
    definition = _definition(text)
    definition["added_tokens"] = []
    made = Tokenizer.from_str(_with_model(definition, _EMPTY_MODEL))
    made.model = model
    secret = uuid.uuid4().hex
    added = sorted(backend.get_added_tokens_decoder().items())
    others = {index: token for index, token in added if token.content not in control}
    # A control token outside the model's vocabulary gets a placeholder, so that the others keep their ids.
    kept = [token for _, token in added if token.content not in control or model.token_to_id(token.content) is None]
    made.add_tokens([AddedToken(secret + t.content) if t.content in control else t for t in kept] if others else [])
    if any(made.token_to_id(token.content) != index for index, token in others.items()):
        return None
    definition["added_tokens"] = list(others)
    return made, WordCache.of(made, definition)


def _produces(model: BPE, piece: str) -> bool:
    """Return whether a model may produce a token from text.

    Merges that produce a token within a text also produce it from that piece alone: none of them crosses its ends,
    and the order of the others is the same.
    """
    index = model.token_to_id(piece)
    if index is None:
        return False
    plain = not (model.ignore_merges or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
    return not plain or [token.id for token in model.tokenize(piece)] == [index]


def _definition(text: str) -> dict[str, Any]:
    """Parse a definition without its model, which comes last and is most of it."""
    definition: dict[str, Any] = json.loads(text[: text.index('"model":{')] + '"model":null}')
    return definition


def _with_model(definition: dict[str, Any], model: str) -> str:
    """Return a definition with this model, for text between control tokens."""
    whole = {key: value for key, value in definition.items() if key != "model"}
    whole["post_processor"] = whole["truncation"] = whole["padding"] = None
    # A stretch follows a control token, and the "first" scheme adds its blank only at the start of the whole text.
    plain = json.dumps(whole).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    return f'{plain[:-1]}, "model": {model}}}'


def _copy(
    text: str, control: frozenset[str], added: set[str], backend: Tokenizer
) -> tuple[Tokenizer, WordCache | None]:
    """Copy a tokenizer with its model, and give the control tokens random names."""
    definition, model = _definition(text), text[text.index('"model":{') + len('"model":') : -1]
    # Renamed, not removed, so that the others keep their ids.
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
    # Words such as `role` are names in the template's code.
    written = token.content in template and not token.content.isspace() and not token.content.isidentifier()
    return token.special or written or _MARKUP.fullmatch(token.content) is not None


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename pieces of a model's vocabulary in place."""
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        return
    model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [(a, b) for a, b in model["merges"] if not ({a, b, a + b} & names.keys())]
