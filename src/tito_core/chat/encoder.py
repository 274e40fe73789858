"""Text with content spans -> token ids with provenance, so that content cannot become a control token (law 6).

Control tokens are matched in the scaffold's characters only. Each stretch between them is encoded whole, by a copy of
the tokenizer without control tokens. Encoding content and scaffold apart would change the merges at their seams
(`user\\n` + `\\nhi`), and the tokenizer itself would encode `<|im_end|>` in a user's text as a control token.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tito_core.chat.tokenizer import TokenizerError
from tito_core.chat.traced import Span, Traced
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.provenance import Provenance, Provenances

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LONG_TEXT = 1 << 15
"""Characters from which encoding takes milliseconds, so other threads must be able to run meanwhile."""
CACHE_SIZE = 1 << 12
"""Capacity of the caches of scaffold stretches."""
MAX_CACHED_SCAFFOLD = 256
"""Longest cached stretch of scaffold, in characters."""
WORD_CACHE_SIZE = 1 << 16
"""Capacity of a cache of words."""
MAX_CACHED_CHARS = 32
"""Longest cached word, in characters."""
_BATCH = 1 << 14
"""Words per batch of a long text, so that other threads can run in between."""
_PROMPT, _SCAFFOLD = bytes([Provenance.PROMPT]), bytes([Provenance.SCAFFOLD])
_SPACES = re.compile(r"\s*")
_SURROGATES = re.compile("[\ud800-\udfff]")
"""Lone surrogates, which tokenizers reject; they become U+FFFD."""
Control = tuple[int, int, int]
"""(start, stop, id) of a control token in rendered text, in characters."""
Places = npt.NDArray[np.int64] | Sequence[int]
"""Places of tokens in a text, in characters, shape (n,)."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Token ids (int32, shape (n,)), the provenance of each (uint8, shape (n,)), and the rendered text if kept."""

    ids: TokenIds
    provenance: Provenances
    text: str | None = None

    def equals(self, other: EncodedText) -> bool:
        """Return whether both hold the same tokens, provenance and text."""
        return (self.ids.tobytes(), self.provenance.tobytes(), self.text) == (
            other.ids.tobytes(),
            other.provenance.tobytes(),
            other.text,
        )

    @classmethod
    def joined(cls, ids: Iterable[bytes], provenance: Iterable[bytes], text: str) -> EncodedText:
        """Join packed pieces: ids as int32, provenance as one byte per id."""
        packed_ids, packed_provenance = bytearray().join(ids), bytearray().join(provenance)
        return cls(np.frombuffer(packed_ids, np.int32), np.frombuffer(packed_provenance, np.uint8), text)


class ContentSafeEncoder:
    """Encodes rendered templates so that content gives no control token (law 6).

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        markup: Texts of added tokens that a parser reads as control tokens, besides those of a known form.
        inert: Whether content gives no control token. If False, content is matched like scaffold.

    Attributes:
        inert: The argument.
        tokenizer: A private copy of the tokenizer, which matches control tokens in any text.
        added: Ids of the control tokens by text.
        control_ids: Ids of the control tokens.
        digest: sha256 of the tokenizer's definition, hex.
        eos_id: Id of the tokenizer's eos_token if it is a control token, else None.
        vocab_size: Number of the tokenizer's ids, added tokens included.

    Raises:
        TokenizerError: The tokenizer is not a fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, inert: bool = True, markup: Collection[str] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise TokenizerError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, which token-exact prompts need. "
                "Load it with AutoTokenizer.from_pretrained(..., use_fast=True) from a folder with tokenizer.json."
            )
        self._plain = plain = InertTokenizer.of(backend, str(tokenizer.chat_template or ""), markup)
        self.tokenizer = plain.original
        self.digest = plain.digest
        self.vocab_size = len(tokenizer)  # cached: a fast tokenizer counts on each call
        tokens = {
            i: token for i, token in plain.original.get_added_tokens_decoder().items() if token.content in plain.control
        }
        self.added = {token.content: index for index, token in tokens.items()}
        self.control_ids = frozenset(tokens)
        self.eos_id = self.added.get(str(tokenizer.eos_token))
        self._packed = {index: np.int32(index).tobytes() for index in tokens}
        self._scaffolds: dict[str, Sequence[Control]] = {}
        self._stretches: dict[str, tuple[bytes, bytes]] = {}
        self.inert = inert
        self._strips_left = frozenset(index for index, token in tokens.items() if token.lstrip)
        self._strips_right = frozenset(index for index, token in tokens.items() if token.rstrip)
        self._inert_tokenizer = plain.tokenizer
        self._words = plain.words
        longest_first = sorted(self.added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: Traced, begin: int = 0, controls: Sequence[Control] | None = None) -> EncodedText:
        """Encode rendered text: control ids where the scaffold has them, ordinary ids elsewhere.

        Args:
            text: The rendering.
            begin: First character to encode; must be a boundary of a control token.
            controls: The control tokens from `begin` on, if known from `controls`.
        """
        parts: list[tuple[bytes, bytes]] = []
        at, span, spans = begin, 0, text.spans
        for start, stop, token in self._controls(text, begin) if controls is None else controls:
            span = self._encode_stretch(text, at, start, span, parts)
            # It is scaffold, even if it strips blanks of content.
            is_scaffold = self.inert or span == len(spans) or spans[span][0] >= stop
            parts.append((self._packed[token], _SCAFFOLD if is_scaffold else _PROMPT))
            at = stop
        self._encode_stretch(text, at, len(text), span, parts)
        rendered = str.__getitem__(text, slice(begin, None))
        return EncodedText.joined([ids for ids, _ in parts], [provenance for _, provenance in parts], rendered)

    def count(self, content: str) -> int:
        """Return the number of tokens of content alone."""
        return self._encoded(str.__str__(content))[1]

    def controls(self, text: Traced) -> list[Control]:
        """List the scaffold's control tokens as (start, stop, id) in characters, with the blanks that they strip."""
        return list(self._controls(text, 0))

    def _controls(self, text: Traced, at: int) -> Iterator[Control]:
        plain = str.__str__(text)
        for gap_start, gap_stop in _gaps(text.spans, at, len(text)) if self.inert else ((at, len(text)),):
            for first, last, token in self._match_controls(plain[gap_start:gap_stop]):
                start, stop = gap_start + first, gap_start + last
                if start < at:
                    continue
                if token in self._strips_left:
                    start = at + len(plain[at:start].rstrip())
                if token in self._strips_right and (blanks := _SPACES.match(plain, stop)):
                    stop = blanks.end()
                yield start, stop, token
                at = stop

    def _match_controls(self, scaffold: str) -> Sequence[Control]:
        """List the control tokens in a stretch of scaffold; cached, since a template has few different ones."""
        controls = self._scaffolds.get(scaffold)
        if controls is None:
            found = self._pattern.finditer(scaffold)
            controls = tuple((match.start(), match.end(), self.added[match.group()]) for match in found)
            if len(scaffold) <= MAX_CACHED_SCAFFOLD:
                if len(self._scaffolds) >= CACHE_SIZE:
                    self._scaffolds.clear()
                self._scaffolds[scaffold] = controls
        return controls

    def _encode_stretch(self, text: Traced, start: int, stop: int, span: int, parts: list[tuple[bytes, bytes]]) -> int:
        """Append the packed ids and provenance of the characters from `start` to `stop`.

        Args:
            text: The rendering.
            start: First character.
            stop: One past the last character.
            span: Number of a content span; those before it end at or before `start`.
            parts: Is appended to.

        Returns:
            The number of the first content span that ends after `stop`, or of all.
        """
        spans, inside = text.spans, list[tuple[int, int]]()
        while span < len(spans) and spans[span][0] < stop:
            a, b, _ = spans[span]
            if b > start:
                inside.append((a - start, b - start))
            if b > stop:
                break
            span += 1
        if start < stop:
            stretch = str.__getitem__(text, slice(start, stop))
            parts.append(self.encode_stretch(stretch, inside) if inside else self._scaffold(stretch))
        return span

    @property
    def strips_blanks(self) -> bool:
        """Whether encoding a control token removes the blanks next to it. Those blanks may be content."""
        return bool(self._strips_left or self._strips_right)

    def encode_stretch(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[bytes, bytes]:
        """Return the packed ids and provenance of text without control tokens, given its content spans."""
        packed, count, bounds = self._encoded(text)
        if len(spans) > 1:
            spans = _merged(spans)
        if spans[0][0] <= 0 and spans[0][1] >= len(text):
            return packed, _PROMPT * count
        starts, stops = bounds()
        return packed, _provenance(starts, stops, spans)

    def _scaffold(self, stretch: str) -> tuple[bytes, bytes]:
        """Return the packed ids and provenance of a stretch without content; cached."""
        encoded = self._stretches.get(stretch)
        if encoded is None:
            packed, count, _ = self._encoded(stretch)
            encoded = packed, _SCAFFOLD * count
            if len(stretch) <= MAX_CACHED_SCAFFOLD:
                if len(self._stretches) >= CACHE_SIZE:
                    self._stretches.clear()
                self._stretches[stretch] = encoded
        return encoded

    def _encoded(self, stretch: str) -> tuple[bytes, int, Callable[[], tuple[Places | None, Places]]]:
        """Return a stretch's packed ids, their number, and a function that returns the bounds of each token."""
        found = self._words.encode(stretch) if self._words is not None else None
        if found is not None:
            packed, stops = found
            return packed, len(stops), lambda: (None, stops)
        if not stretch.isascii():
            stretch = _SURROGATES.sub("\ufffd", stretch)
        if len(stretch) < LONG_TEXT:
            encoding = self._inert_tokenizer.encode(stretch, add_special_tokens=False)
        else:  # the same result, but the GIL is released
            encoding = self._inert_tokenizer.encode_batch([stretch], add_special_tokens=False)[0]
        ids = encoding.ids
        if len(ids) < LONG_TEXT:
            packed = np.array(ids, np.int32).tobytes()
        else:  # other threads run between the parts
            starts = range(0, len(ids), LONG_TEXT)
            packed = b"".join([np.array(ids[at : at + LONG_TEXT], np.int32).tobytes() for at in starts])
        return packed, len(ids), lambda: _bounds(_offsets(encoding), len(stretch))


def _offsets(encoding: Encoding) -> Sequence[tuple[int, int]] | npt.NDArray[np.int64]:
    """Return the (start, stop) of each token. Long encodings are read in parts, because `offsets` holds the GIL."""
    count = len(encoding)
    if count < LONG_TEXT:
        return cast(Sequence[tuple[int, int]], encoding.offsets)
    parts = range(0, count, LONG_TEXT)
    return np.concatenate(
        [
            np.array([encoding.token_to_chars(i) for i in range(at, min(at + LONG_TEXT, count))], np.int64)
            for at in parts
        ]
    )


def _bounds(offsets: Sequence[tuple[int, int]] | npt.NDArray[np.int64], length: int) -> tuple[Places, Places]:
    """Return the starts and stops of tokens, in characters.

    A normaliser that composes characters reports only the first, so each token is extended up to the next one.
    """
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    if not (starts[1:] == stops[:-1]).all():
        following = np.append(starts, length)[np.searchsorted(starts, starts, side="right")]
        stops = np.maximum(stops, following)
    return starts, stops


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent spans, so that an empty token between them counts as content."""
    merged = [*spans[:1]]
    for start, stop in spans[1:]:
        if start == merged[-1][1]:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return merged


def _provenance(starts: Places | None, stops: Places, spans: Sequence[tuple[int, int]]) -> bytes:
    """Return the packed provenance: PROMPT for each token that overlaps a content span, else SCAFFOLD.

    If `starts` is None, each token starts where the one before it ends.
    """
    provenance = bytearray(_SCAFFOLD * len(stops))
    for begin, end in spans:
        first = bisect_right(stops, begin)
        last = min(bisect_left(stops, end) + 1, len(stops)) if starts is None else bisect_left(starts, end)
        provenance[first:last] = _PROMPT * (last - first)
    return bytes(provenance)


def _gaps(spans: tuple[Span, ...], at: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches of scaffold from character `at` on."""
    for start, stop, _ in spans:
        if stop <= at:
            continue
        if at < start:
            yield at, start
        at = stop
    if at < length:
        yield at, length


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Copies:
    """The private copies of one tokenizer, shared by all policies with an equal one while any of them uses it.

    It exists because it can be referred to weakly: tokenizers 0.22 has no weak references to its own objects.
    """

    original: Tokenizer
    inert: dict[frozenset[str], tuple[Tokenizer, WordCache | None]] = field(default_factory=dict)


_copies: WeakValueDictionary[str, _Copies] = WeakValueDictionary()
"""Copies by digest of the definition. One with a model of its own takes up to seconds and hundreds of megabytes."""


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
        """The original as it was, which its owner's calls do not change; only the model is shared, if possible.

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
            copies = _copies.setdefault(digest, _Copies(_original(text, backend)))
        original = copies.original
        added = original.get_added_tokens_decoder().values()
        control = frozenset(token.content for token in added if token.content in markup or _is_control(token, template))
        if control not in copies.inert:
            copies.inert[control] = _share_model(text, control, original) or _copy(
                text, control, {token.content for token in added}, original
            )
        return cls(*copies.inert[control], control, digest, copies)


_MARKUP = re.compile(
    r"<[|｜].*>|<.*[|｜]>|｜.*｜|\[/?[A-Z_]+\]|"
    r"</?(?:think|thought|reasoning|tools?|tool_\w+|function|parameter|arg_\w+)[ =]?>",
    re.DOTALL,
)
"""Added tokens of these forms are control tokens whatever their flags are, because parsers read them as markup."""


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


def _original(text: str, backend: Tokenizer) -> Tokenizer:
    """Return a copy without padding and truncation. It shares the model: parsing that takes up to seconds."""
    definition, _ = _parts(text)
    definition["added_tokens"] = []
    made = Tokenizer.from_str(json.dumps(definition))
    made.model = backend.model
    added = sorted(backend.get_added_tokens_decoder().items())
    made.add_tokens([token for _, token in added])
    same = repr(sorted(made.get_added_tokens_decoder().items())) == repr(added)
    return made if same else Tokenizer.from_str(text)


def _share_model(text: str, control: frozenset[str], backend: Tokenizer) -> tuple[Tokenizer, WordCache | None] | None:
    """Return a tokenizer without control tokens that shares the model; None if that could change any encoding.

    This takes no time. The model must not produce the control tokens from any text.
    """
    model = backend.model
    if not isinstance(model, BPE) or any(_produces(model, piece) for piece in control):
        return None
    definition, _ = _parts(text)
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


def _parts(text: str) -> tuple[dict[str, Any], str]:
    """Return a definition with an empty model, and the text of its model, which comes last and is most of it."""
    at = text.index('"model":{') + len('"model":')
    return json.loads(f"{text[:at]}{_EMPTY_MODEL}}}"), text[at:-1]


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
    definition, model = _parts(text)
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


_BYTES = ByteLevel(add_prefix_space=False, use_regex=False)
_CLASSES = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
"""The ASCII members of Unicode classes."""
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_GPT2 = {**_BYTE_LEVEL, "use_regex": True}


class _Cache(dict[str, bytes]):
    """Caches a function of short words; a `dict`, so that hits run in C."""

    def __init__(self, function: Callable[[str], bytes]) -> None:
        self._function = function

    def __missing__(self, text: str) -> bytes:
        found = self._function(text)
        if len(text) <= MAX_CACHED_CHARS:
            if len(self) >= WORD_CACHE_SIZE:
                self.clear()
            self[text] = found
        return found


class WordCache:
    """Encodes ASCII text word by word. Thread-safe. Build it with `WordCache.of`.

    Most byte-level tokenizers split text into words by one regular expression and encode each word alone, so a word's
    ids can be cached. The `tokenizers` library spends most of its time on the split; for ASCII text, Python's `re` does
    it in a tenth of the time. Without the cache, a turn with a tool result of 1,500 characters costs the client over a
    tenth more CPU.
    """

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str]) -> None:
        self._model = tokenizer.model
        self._pattern = pattern
        self._words = _Cache(self._look_up)

    @classmethod
    def of(cls, tokenizer: Tokenizer, definition: dict[str, Any]) -> WordCache | None:
        """Return the cache of a tokenizer, or None if it is not known to encode word by word.

        Args:
            tokenizer: The tokenizer.
            definition: Its definition without the model; serialising all of it takes half a second.
        """
        pattern = _pattern(definition)
        return None if pattern is None else cls(tokenizer, pattern)

    def encode(self, text: str) -> tuple[bytes, Places] | None:
        """Return the tokens of a text; None if it is not ASCII or the words do not cover it.

        Returns:
            The ids as packed int32 in native byte order, and the end of each token in characters, shape (n,).
        """
        if not text.isascii():
            return None
        words = [self._pattern.findall(text)] if len(text) < LONG_TEXT else self._batches(text)
        packed = b"".join([b"".join(map(self._words.__getitem__, batch)) for batch in words])
        tokens = np.frombuffer(packed, np.int32).reshape(-1, 2)
        stops = tokens[:, 1].cumsum(dtype=np.int64)
        return (tokens[:, 0].tobytes(), stops) if len(stops) and stops[-1] == len(text) else None

    def _batches(self, text: str) -> Iterator[list[str]]:
        """Yield the words of a text in batches; `findall` would hold the GIL until its end."""
        found = map(re.Match.group, self._pattern.finditer(text))
        while batch := list(islice(found, _BATCH)):
            yield batch

    def _look_up(self, word: str) -> bytes:
        """Return each token of a word as its id and its length in characters, int32."""
        ((mapped, _),) = _BYTES.pre_tokenize_str(word)
        tokens = self._model.tokenize(mapped)
        return np.array([(token.id, len(token.value)) for token in tokens], np.int32).tobytes()


def _pattern(definition: dict[str, Any]) -> re.Pattern[str] | None:
    """Return the expression by which a tokenizer splits ASCII text into words; None if it splits in another way."""
    normalizer = definition["normalizer"] or {"type": "NFC"}
    if definition["added_tokens"] or normalizer not in ({"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        return None
    expression = _expression(definition["pre_tokenizer"] or {})
    translated = None if expression is None else _ascii(expression)
    return None if translated is None else re.compile(translated, re.ASCII)


def _expression(pre_tokenizer: dict[str, Any]) -> str | None:
    """Return the Oniguruma expression whose matches are the words, or None for other pre-tokenizers."""
    match pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        case [{"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": str(expression)}}, last]:
            return expression if last.items() >= _BYTE_LEVEL.items() else None
        case [last] if last.items() >= _GPT2.items():
            return _gpt2(r" ?\p{N}+")
        case [{"type": "Digits", "individual_digits": bool(alone)}, last] if last.items() >= _GPT2.items():
            # Digits are split off first, so they take no blank, and blanks before them end a text.
            return _gpt2(r"\p{N}" if alone else r"\p{N}+", r"[^\s\p{N}]")
    return None


def _gpt2(numbers: str, after_blanks: str = r"\S") -> str:
    """Return the expression of `ByteLevel`, GPT-2's (tokenizers, `byte_level.rs`)."""
    return rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!{after_blanks})|\s+"


def _ascii(expression: str) -> str | None:
    """Convert an Oniguruma expression to Python's `re` for ASCII text; None if the two may differ."""
    pieces: list[str] = []
    inside = False
    for part in re.findall(r"\\p\{\w+\}|\\.|\[|\]|[^\\\[\]]+", expression, re.DOTALL):
        if part in "[]":
            inside = part == "["
        if part.startswith("\\p"):
            if (letters := _CLASSES.get(part[3:-1])) is None:
                return None
            pieces.append(letters if inside else f"[{letters}]" if letters else r"(?!)")
        else:
            pieces.append(part)
    rewritten = "".join(pieces)
    # Capturing groups change what findall returns, and `re` reads an empty class differently.
    if "[]" in rewritten or "[^]" in rewritten or re.search(r"(?<!\\)\((?!\?)", rewritten):
        return None
    return rewritten
