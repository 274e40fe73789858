"""Words that are looked up: the ids and lengths that the tokenizer itself gives."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from strands_tito.engines import models
from support import zoo
from support.byte_level import shared
from tito_core.chat import word_cache as words
from tito_core.chat.inert_tokenizer import InertTokenizer
from tito_core.chat.word_cache import WordCache, _ascii

ASCII = st.text(st.characters(max_codepoint=127), max_size=40)
PIECES = st.lists(
    st.sampled_from(["I'm", "we'LL", "'s", "\n\n", "\r\n", "a1234b", "\t", "", "x==", "//n", "("]), max_size=12
).map(" ".join)


OF = {"qwen3": "qwen3", "llama3": "llama3_1", "gptoss": "gptoss", "gemma3": "gemma3", "deepseek": "deepseekv3"}


def plain(name: str) -> Tokenizer:
    return zoo.template(OF[name]).encoder._inert_tokenizer


def holds_to(tokenizer: Tokenizer) -> None:
    known = WordCache.of(tokenizer)
    assert known is not None

    @settings(deadline=None, max_examples=150)
    @given(ASCII | PIECES)
    def holds(text: str) -> None:
        for _ in range(2):  # looked up, then remembered
            found = known.encode(text)
            encoding = tokenizer.encode(text, add_special_tokens=False)
            if not text or tokenizer.decode(encoding.ids) != text:  # SmolLM2 has no tokens for some of the bytes
                assert found is None
                continue
            assert found is not None
            assert np.frombuffer(found.ids, np.int32).tolist() == encoding.ids
            assert list(found.stops) == [stop for _, stop in encoding.offsets]

    holds()


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gptoss"])
def test_ids_and_lengths_are_the_tokenizers(name: str) -> None:
    holds_to(plain(name))


BLANKS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    "cutting",
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
def test_byte_levels_own_words_are_the_tokenizers(cutting: dict[str, Any]) -> None:
    definition = json.loads(plain("qwen3").to_str())
    definition["pre_tokenizer"] = cutting
    holds_to(Tokenizer.from_str(json.dumps(definition)))


def test_smollm2_works_word_by_word() -> None:
    holds_to(InertTokenizer.of(models.load_tokenizer("smollm2").backend_tokenizer, "").tokenizer)


@pytest.mark.parametrize("name", ["gemma3", "deepseek"])
def test_tokenizers_that_cut_otherwise_are_left_alone(name: str) -> None:
    assert WordCache.of(plain(name)) is None


def test_text_that_is_not_ascii_is_left_alone() -> None:
    known = WordCache.of(plain("qwen3"))
    assert known is not None
    assert known.encode("naïve") is None
    assert known.encode("") is None


@cache
def small() -> str:
    definition = json.loads(plain("qwen3").to_str())
    definition["model"]["vocab"] = {piece: i for piece, i in definition["model"]["vocab"].items() if len(piece) == 1}
    definition["model"]["merges"] = []
    return json.dumps(definition)


def changed(**changes: Any) -> Tokenizer:
    definition = json.loads(small())
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
def test_what_is_not_known_to_work_word_by_word_is_left_alone(changes: dict[str, Any]) -> None:
    assert WordCache.of(changed()) is not None
    assert WordCache.of(changed(**changes)) is None


def test_added_tokens_are_left_to_the_tokenizer() -> None:
    tokenizer = changed()
    tokenizer.add_tokens(["<b>"])
    assert WordCache.of(tokenizer) is None
    assert WordCache.of(shared().backend_tokenizer) is None


def test_an_expression_that_leaves_text_out_is_left_to_the_tokenizer() -> None:
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


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "CACHE_SIZE", 3)
    known = WordCache.of(plain("qwen3"))
    assert known is not None
    for i in range(10):
        assert known.encode(f"word{i} and {'x' * 50}") is not None
        assert len(known._words) <= 3
        assert len(known._texts) <= 3
        assert all(len(text) <= words.MAX_CACHED_CHARS for text in (*known._words, *known._texts))
