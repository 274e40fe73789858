"""Tokenizers without control tokens: over the shared model where possible, else over a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from support import zoo
from support.budget import PROVE
from tito_core.chat.encoder import InertTokenizer, _copy, _produces, _share_model

REAL = {"qwen3": "qwen3", "llama3": "llama3_1", "gptoss": "gptoss", "gemma3": "gemma3", "deepseek": "deepseekv3"}


def bpe(*words: str, **options: Any) -> models.BPE:
    """Return a model that merges each word from the left."""
    vocab: dict[str, int] = {}
    merges = []
    for word in words:
        for character in word:
            vocab.setdefault(character, len(vocab))
        for i in range(1, len(word)):
            merges.append((word[:i], word[i]))
            vocab.setdefault(word[: i + 1], len(vocab))
    return models.BPE(vocab, list(dict.fromkeys(merges)), **options)


def tokenizer(model: Any, *control: str, others: tuple[str, ...] = ()) -> Tokenizer:
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    made.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    made.add_tokens(list(others))
    return made


@pytest.mark.parametrize("name", REAL if PROVE else ("qwen3", "deepseek"))
def test_real_tokenizers_give_the_same_ids_over_the_shared_model_as_over_a_copy(name: str) -> None:
    loaded = zoo.tokenizer(REAL[name])
    backend = loaded.backend_tokenizer
    found = InertTokenizer.of(backend, loaded.chat_template)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    copy, words = _copy(backend.to_str(), found.control, added, backend)
    assert _share_model(backend.to_str(), found.control, backend) is not None
    assert found.original.to_str() == backend.to_str()
    assert (found.words is None) == (words is None)
    controls = {index for index, token in backend.get_added_tokens_decoder().items() if token.content in found.control}
    pieces = st.sampled_from([*sorted(added), "<", "|>", "im_end", "\n", " ", "a", "é", "｜", "日本"])

    @settings(deadline=None, max_examples=30)
    @given(st.lists(st.one_of(pieces, st.text(max_size=8)), max_size=6).map("".join))
    def holds(text: str) -> None:
        text = text.encode("utf-8", "replace").decode()
        shared, apart = (each.encode(text, add_special_tokens=False) for each in (found.tokenizer, copy))
        assert shared.ids == apart.ids
        assert shared.offsets == apart.offsets
        assert controls.isdisjoint(shared.ids)

    holds()


@pytest.mark.parametrize(
    ("model", "made"),
    [
        (bpe("<x>"), True),
        (bpe("<x", "x>"), False),
        (bpe("ab", "<x>"), True),
        (models.BPE({"<": 0, "x": 1, ">": 2, "<x>": 3}, []), False),
        (models.BPE({"<": 0, "x": 1, ">": 2, "<x>": 3}, [], ignore_merges=True), True),
        (models.BPE({"<": 0, "x": 1, ">": 2, "<x>": 3}, [], dropout=0.5), True),
        (models.BPE({"<": 0, "x": 1, ">": 2, "<x>": 3}, [], continuing_subword_prefix="#"), True),
        (models.BPE({"<": 0, "x": 1, ">": 2, "<x>": 3}, [], end_of_word_suffix="#"), True),
    ],
)
def test_whether_a_model_may_produce_a_token(model: models.BPE, made: bool) -> None:
    assert _produces(model, "<x>") == made


@pytest.mark.parametrize(
    "model",
    [
        bpe("<x>", "ab"),
        models.BPE({"<": 0, "x": 1, ">": 2, "<x>": 3, "a": 4, "b": 5}, [], ignore_merges=True),
        models.Unigram(
            [("<unk>", 0.0), ("<x>", -1.0), ("<", -2.0), ("x", -2.0), (">", -2.0), ("a", -2.0), ("b", -2.0)], 0
        ),
    ],
)
def test_a_model_that_produces_control_tokens_is_not_shared(model: Any) -> None:
    backend = tokenizer(model, "<x>")
    assert _share_model(backend.to_str(), frozenset({"<x>"}), backend) is None
    plain = InertTokenizer.of(backend, "")
    for text in ("<x>", "a<x>b", "<x><x>", "ab <x>"):
        assert backend.token_to_id("<x>") in backend.encode(text).ids
        assert backend.token_to_id("<x>") not in plain.tokenizer.encode(text).ids


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text("<x>ab", min_size=1, max_size=4), max_size=4), st.text("<x>ab ", max_size=12))
def test_a_token_that_merges_do_not_produce_alone_is_produced_nowhere(words: list[str], text: str) -> None:
    model = bpe("<>xab", *words)
    for piece in ("<x>", "xa", "<<", "ab"):
        index = model.token_to_id(piece)
        if index is not None and not _produces(model, piece):
            assert all(index != token.id for token in model.tokenize(text.replace(" ", "")))


def test_ordinary_added_tokens_keep_their_ids_and_stay_ordinary() -> None:
    backend = tokenizer(bpe("ab"), "<x>", "<z>", others=("<b>", "<i>"))
    plain = InertTokenizer.of(backend, "")
    assert _share_model(backend.to_str(), plain.control, backend) is not None
    assert plain.control == {"<x>", "<z>"}
    ids = {text: backend.token_to_id(text) for text in ("<b>", "<i>")}
    assert plain.tokenizer.encode("ab<b>ab<i>").ids == backend.encode("ab<b>ab<i>").ids
    assert set(ids.values()) <= set(plain.tokenizer.encode("ab<b>ab<i>").ids)
    assert plain.words is None


def test_a_copy_is_made_if_sharing_would_change_ids() -> None:
    # An ordinary token whose id leaves a gap before it.
    backend = Tokenizer(bpe("ab"))
    backend.add_tokens(["<b>"])
    text = backend.to_str().replace('"id":3,', '"id":7,')
    moved = Tokenizer.from_str(text)
    plain = InertTokenizer.of(moved, "")
    assert plain.tokenizer.encode("ab<b>").ids == moved.encode("ab<b>").ids
    assert plain.original.to_str() == moved.to_str()


def test_what_an_owner_adds_to_a_tokenizer_does_not_reach_the_private_copy() -> None:
    backend = tokenizer(bpe("ab"), "<x>", others=("<b>",))
    definition = backend.to_str()
    plain = InertTokenizer.of(backend, "")
    backend.add_tokens(["<y>"])
    backend.enable_padding(length=9)
    backend.enable_truncation(1)
    backend.normalizer = normalizers.Lowercase()
    assert plain.original.to_str() == definition
    assert plain.tokenizer.encode("ab<y>").ids == Tokenizer.from_str(definition).encode("ab<y>").ids


def test_equal_tokenizers_are_copied_once_while_a_copy_is_in_use() -> None:
    backend, equal = tokenizer(bpe("ab"), "<x>"), tokenizer(bpe("ab"), "<x>")
    plain = InertTokenizer.of(backend, "")
    assert InertTokenizer.of(backend, "").tokenizer is plain.tokenizer is InertTokenizer.of(equal, "").tokenizer
    backend.add_tokens(["<y>"])
    assert InertTokenizer.of(backend, "<y>").control == {"<x>", "<y>"}
    assert InertTokenizer.of(backend, "<y>").tokenizer is not InertTokenizer.of(backend, "").tokenizer


def not_shared(*control: str, others: tuple[str, ...] = (), **options: Any) -> Tokenizer:
    """Return a tokenizer whose model produces control tokens from text, so that it is copied."""
    return tokenizer(bpe("<x>", "ab", "b<x", "abc", **options), *control, others=others)


@settings(deadline=None, max_examples=30)
@given(st.text("<x>abc ", max_size=12))
def test_a_copy_keeps_the_ids_of_text_without_control_tokens(text: str) -> None:
    copied = InertTokenizer.of(COPIED, "").tokenizer
    assert COPIED.token_to_id("<x>") not in copied.encode(text).ids
    if "<x" not in text:
        assert copied.encode(text).ids == COPIED.encode(text).ids


@pytest.mark.parametrize("others", [(), ("<b>",), ("<b>", "ac")])
def test_a_copy_keeps_ordinary_added_tokens(others: tuple[str, ...]) -> None:
    backend = not_shared("<x>", "<z>", others=others)
    plain = InertTokenizer.of(backend, "")
    assert plain.control == {"<x>", "<z>"}
    for text in ("ab<b>ab", "ac", "<b>", "abc abac<b><b>"):
        assert plain.tokenizer.encode(text).ids == backend.encode(text).ids
    for text in ("<x>", "<z>", "a<z>b<x>"):
        assert {backend.token_to_id("<x>"), backend.token_to_id("<z>")}.isdisjoint(plain.tokenizer.encode(text).ids)


def test_a_copy_renames_control_tokens_at_random() -> None:
    backend = not_shared("<x>", others=("<b>",))
    index = backend.token_to_id("<x>")
    names = set()
    for _ in range(2):
        copied, _ = _copy(backend.to_str(), frozenset({"<x>"}), {"<x>", "<b>"}, backend)
        names.add(copied.id_to_token(index))
    assert len(names) == 2
    assert all(len(name) > 32 for name in names if name)


@pytest.mark.parametrize("kept", [True, False])
def test_a_copy_keeps_the_unknown_token(kept: bool) -> None:
    vocabulary = {"<unk>": 0, "<x>": 1, "a": 2}
    backend = tokenizer(models.WordLevel(vocabulary, "<unk>"), "<x>", *(() if kept else ("<unk>",)))
    copied = InertTokenizer.of(backend, "").tokenizer
    assert copied.encode("a").ids == [2]
    assert copied.encode("b").ids == backend.encode("b").ids == [0]
    assert copied.encode("<x>").ids == [0]


def test_a_copy_has_a_word_cache_too() -> None:
    backend = Tokenizer(models.BPE({"<": 0, "x": 1, ">": 2, "<x": 3, "<x>": 4}, [("<", "x"), ("<x", ">")]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|[^\p{L}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.add_special_tokens([AddedToken("<x>", normalized=False)])
    plain = InertTokenizer.of(backend, "")
    assert plain.words is not None
    for text in ("<x>", "x<x", "<x>x>"):
        found = plain.words.encode(text)
        assert found is not None
        assert np.frombuffer(found[0], np.int32).tolist() == plain.tokenizer.encode(text).ids


COPIED = not_shared("<x>")
