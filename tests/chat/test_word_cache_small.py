"""The word cache of a small tokenizer gives the ids and the provenance of the tokenizer itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from support.byte_level import MARKUP, SPECIAL, wrapped
from tito_core.chat import encoder as words
from tito_core.chat.encoder import MAX_CACHED_CHARS, ContentSafeEncoder, WordCache, _ascii
from tito_core.chat.traced import Traced, concat

EXPRESSION = r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"


def backend(*control: str) -> Tokenizer:
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ċ", "Ċ"), ("i", "n"), ("<", "|"), ("|", ">"), ("1", "2")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    split = pre_tokenizers.Split(Regex(EXPRESSION), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    return made


PLAIN = backend()
TOKENIZER: Any = wrapped(backend(*SPECIAL, *MARKUP))
BY_WORD, WHOLE = ContentSafeEncoder(TOKENIZER), ContentSafeEncoder(TOKENIZER)
WHOLE._words = None
TEXT = st.text("the in12'<|>\n", max_size=10)
RUNS = st.lists(st.tuples(st.booleans(), st.one_of(TEXT, st.sampled_from([*SPECIAL, *MARKUP, "é", "the"]))), max_size=5)


def known() -> WordCache:
    found = WordCache.of(PLAIN)
    assert found is not None
    return found


@settings(deadline=None, max_examples=100)
@given(st.text("the in12'<|>\n", min_size=1, max_size=200))
def test_ids_and_positions_equal_the_tokenizers(text: str) -> None:
    encoding = PLAIN.encode(text, add_special_tokens=False)
    for few in (0, words.SMALL_BYTES, 2**30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(words, "SMALL_BYTES", few)
            found = known().encode(text)
        assert found is not None
        assert np.frombuffer(found.ids, np.int32).tolist() == encoding.ids
        assert list(found.stops) == [stop for _, stop in encoding.offsets]
        assert isinstance(found.stops, list) == (8 * len(encoding.ids) <= few)


@settings(deadline=None, max_examples=200)
@given(RUNS)
def test_provenance_is_the_same_with_and_without_the_word_cache(runs: list[tuple[bool, str]]) -> None:
    text = concat(Traced.content(text, i) if content else text for i, (content, text) in enumerate(runs))
    rendered = text if isinstance(text, Traced) else Traced.of(text, ())
    found, expected = BY_WORD.encode(rendered), WHOLE.encode(rendered)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.provenance.tolist() == expected.provenance.tolist()
    assert len(found.ids) == len(found.provenance)
    assert BY_WORD._words is not None


def test_words_are_cached_up_to_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    found = known()
    longest = "t" * MAX_CACHED_CHARS
    for text in ("a", longest, f"{longest[1:]}1"):
        assert found.encode(text) is found.encode(text)
    assert longest in found._words
    assert found.encode(longest + "t") is not found.encode(longest + "t")
    assert longest + "t" not in found._words
    monkeypatch.setattr(words, "CACHE_SIZE", 3)
    found = known()
    for i in range(10):
        text = "abcdefghij"[i]
        assert found.encode(text) is found.encode(text)
        assert 0 < len(found._words) <= 3
        assert 0 < len(found._texts) <= 3


@pytest.mark.parametrize(
    ("expression", "ascii_only"),
    [
        (r"[^\p{M}]", None),
        (r"[^\p{M}a]", "[^a]"),
        (r"[X\p{L}]", "[XA-Za-z]"),
        (r"X\p{L}", "X[A-Za-z]"),
        ("\\\n", "\\\n"),
        (r"[\p{Lu}][\p{Ll}]\p{N}", "[A-Z][a-z][0-9]"),
        (r"\p{Lt}|\p{Lm}|\p{Lo}", "(?!)|(?!)|(?!)"),
        (r"a(?=b)\(c", r"a(?=b)\(c"),
        (r"a(b)", None),
        (r"\p{Greek}", None),
    ],
)
def test_expressions_are_converted_for_ascii_or_refused(expression: str, ascii_only: str | None) -> None:
    assert _ascii(expression) == ascii_only


DEFINITION: dict[str, Any] = {
    "normalizer": None,
    "added_tokens": [],
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": EXPRESSION}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    },
}


def changed(step: int, **changes: Any) -> dict[str, Any]:
    steps = [dict(each) for each in DEFINITION["pre_tokenizer"]["pretokenizers"]]
    steps[step] |= changes
    return DEFINITION | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}])
def test_a_tokenizer_with_one_split_expression_has_a_word_cache(normalizer: Any) -> None:
    assert WordCache.of(PLAIN, DEFINITION | {"normalizer": normalizer}) is not None


@pytest.mark.parametrize(
    "definition",
    [
        DEFINITION | {"normalizer": {"type": "Lowercase"}},
        DEFINITION | {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}},
        DEFINITION | {"added_tokens": [{"content": "<b>"}]},
        DEFINITION | {"pre_tokenizer": None},
        DEFINITION | {"pre_tokenizer": {"type": "ByteLevel"}},
        DEFINITION
        | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": DEFINITION["pre_tokenizer"]["pretokenizers"][:1]}},
        DEFINITION
        | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": DEFINITION["pre_tokenizer"]["pretokenizers"] * 2}},
        changed(0, type="Punctuation"),
        changed(0, behavior="Removed"),
        changed(0, invert=True),
        changed(0, pattern={"String": " "}),
        changed(0, pattern={"Regex": r"\p{Han}"}),
        changed(1, type="Digits"),
        changed(1, add_prefix_space=True),
        changed(1, use_regex=True),
    ],
)
def test_other_pre_tokenizers_have_no_word_cache(definition: dict[str, Any]) -> None:
    assert WordCache.of(PLAIN, definition) is None


@pytest.mark.parametrize("text", ["", "é", "aé"])
def test_text_that_is_not_ascii_words_is_not_encoded(text: str) -> None:
    assert known().encode(text) is None
