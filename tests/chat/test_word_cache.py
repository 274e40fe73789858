"""The word cache returns the ids and lengths of the tokenizer itself."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from support import zoo
from support.budget import PROVE
from support.byte_level import shared
from tito_core.chat import encoder as words
from tito_core.chat.encoder import InertTokenizer, WordCache, _ascii
from tito_engines import models

ASCII = st.text(st.characters(max_codepoint=127), max_size=40)
PIECES = st.lists(
    st.sampled_from(["I'm", "we'LL", "'s", "\n\n", "\r\n", "a1234b", "\t", "", "x==", "//n", "("]), max_size=12
).map(" ".join)


@cache
def inert(name: str) -> Tokenizer:
    """Return the inert copy of a real tokenizer."""
    return InertTokenizer.of(zoo.real_tokenizer(name).backend_tokenizer, "").tokenizer


@cache
def with_merges(count: int) -> str:
    """Return the definition of Qwen3's tokenizer with its first merges only, which loads in little time."""
    definition = json.loads(inert("qwen3").to_str())
    model = definition["model"]
    model["merges"] = model["merges"][:count]
    pieces = {"".join(pair) for pair in model["merges"]}
    model["vocab"] = {piece: i for piece, i in model["vocab"].items() if len(piece) == 1 or piece in pieces}
    return json.dumps(definition)


def assert_equal_tokens(tokenizer: Tokenizer) -> None:
    known = WordCache.of(tokenizer)
    assert known is not None

    @settings(deadline=None, max_examples=150 if PROVE else 60)
    @given(ASCII | PIECES)
    def holds(text: str) -> None:
        for _ in range(2):  # the second time from the cache
            found = known.encode(text)
            encoding = tokenizer.encode(text, add_special_tokens=False)
            if not text or tokenizer.decode(encoding.ids) != text:  # SmolLM2 has no tokens for some of the bytes
                assert found is None
                continue
            assert found is not None
            assert np.frombuffer(found.ids, np.int32).tolist() == encoding.ids
            assert list(found.stops) == [stop for _, stop in encoding.offsets]

    holds()


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gptoss"] if PROVE else ["qwen3", "gptoss"])
def test_ids_and_lengths_are_the_tokenizers(name: str) -> None:
    assert_equal_tokens(inert(name))


BLANKS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        BLANKS,
        {"type": "Sequence", "pretokenizers": [BLANKS]},
        *(
            {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": alone}, BLANKS]}
            for alone in (True, False)
        ),
    ],
    ids=["gpt2", "gpt2 in a sequence", "digit by digit", "numbers"],
)
def test_gpt2_pre_tokenizers_give_the_same_words(pre_tokenizer: dict[str, Any]) -> None:
    definition = json.loads(with_merges(10_000))
    definition["pre_tokenizer"] = pre_tokenizer
    assert_equal_tokens(Tokenizer.from_str(json.dumps(definition)))


def test_smollm2_has_a_word_cache() -> None:
    assert_equal_tokens(InertTokenizer.of(models.load_tokenizer("smollm2").backend_tokenizer, "").tokenizer)


@pytest.mark.parametrize("name", ["gemma3", "deepseek"])
def test_other_tokenizers_have_no_word_cache(name: str) -> None:
    assert WordCache.of(inert(name)) is None


def test_text_that_is_not_ascii_is_not_encoded() -> None:
    known = WordCache.of(inert("qwen3"))
    assert known is not None
    assert known.encode("naïve") is None
    assert known.encode("") is None


def changed(**changes: Any) -> Tokenizer:
    definition = json.loads(with_merges(0))
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = definition
        for key in parents:
            inner = inner[int(key) if key.isdigit() else key]
        inner[int(last) if last.isdigit() else last] = value
    return Tokenizer.from_str(json.dumps(definition))


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer__pretokenizers__0__behavior": "Removed"},
        {"pre_tokenizer__pretokenizers__0__invert": True},
        {"pre_tokenizer__pretokenizers__0__pattern": {"String": " "}},
        {"pre_tokenizer__pretokenizers__0__pattern": {"Regex": r"\p{Sc}+|."}},
        {"pre_tokenizer__pretokenizers__0__pattern": {"Regex": r"(a)|."}},
        {"pre_tokenizer__pretokenizers__1__add_prefix_space": True},
        {"pre_tokenizer__pretokenizers__1__use_regex": True},
        {"pre_tokenizer": {**BLANKS, "add_prefix_space": True}},
        {"pre_tokenizer__pretokenizers__0": {"type": "Punctuation", "behavior": "Isolated"}},
        {"pre_tokenizer__pretokenizers__0": {"type": "Digits", "individual_digits": True}},
    ],
)
def test_other_definitions_have_no_word_cache(changes: dict[str, Any]) -> None:
    assert WordCache.of(changed()) is not None
    assert WordCache.of(changed(**changes)) is None


def test_tokenizers_with_added_tokens_have_no_word_cache() -> None:
    tokenizer = changed()
    tokenizer.add_tokens(["<b>"])
    assert WordCache.of(tokenizer) is None
    assert WordCache.of(shared().backend_tokenizer) is None


def test_text_that_the_expression_does_not_cover_is_not_encoded() -> None:
    known = WordCache.of(changed(pre_tokenizer__pretokenizers__0__pattern={"Regex": "a+"}))
    assert known is not None
    assert known.encode("aa") is not None
    assert known.encode("ab") is None


@pytest.mark.parametrize(
    ("expression", "ascii_only"),
    [
        (r"\p{L}+", "[A-Za-z]+"),
        (r"[^\s\p{L}\p{N}]", r"[^\sA-Za-z0-9]"),
        (r"\p{M}?[\p{Lu}\p{M}]", "(?!)?[A-Z]"),
        (r"[\p{M}]", None),
        (r"\p{Han}", None),
        (r"(\d)", None),
        (r"(?:\d)\(", r"(?:\d)\("),
    ],
)
def test_expressions(expression: str, ascii_only: str | None) -> None:
    assert _ascii(expression) == ascii_only


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "CACHE_SIZE", 3)
    known = WordCache.of(inert("qwen3"))
    assert known is not None
    for i in range(10):
        assert known.encode(f"word{i} and {'x' * 50}") is not None
        assert len(known._words) <= 3
        assert len(known._texts) <= 3
        assert all(len(text) <= words.MAX_CACHED_CHARS for text in (*known._words, *known._texts))
