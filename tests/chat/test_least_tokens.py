"""The lower bound on tokens never exceeds the real count, for any tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from support import zoo
from support.scripted import tokenizer
from tito_core.chat.encoder import ContentSafeEncoder, replace_surrogates
from tito_core.chat.least_tokens import LeastTokens

ALPHABET = "abc e\u0301é\u1112\u1161\u11ab한日本🎉\n\t<>"
LETTERS = [*dict.fromkeys(ALPHABET.replace(" ", "▁"))]
PIECES = ["ab", "abc", "▁▁", "▁abc", "日本", "a▁b", "é日"]
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(ALPHABET, max_size=200),
    st.builds(str.__mul__, st.text(ALPHABET + "\ud800x", min_size=1, max_size=4), st.integers(1, 300)),
    st.lists(st.sampled_from(["<x>", "ab", " ", "  ", "日本", "abc", "Ġ", "\u200b", "\u00a0"])).map("".join),
)


def bpe(letters: list[str], pieces: list[str], **options: Any) -> Tokenizer:
    """Return a BPE tokenizer of letters and pieces, each merged from the left."""
    vocab: dict[str, int] = {}
    merges = []
    for letter in letters:
        vocab.setdefault(letter, len(vocab))
    for piece in pieces:
        for stop in range(2, len(piece) + 1):
            if piece[:stop] not in vocab and piece[: stop - 1] in vocab and piece[stop - 1] in vocab:
                vocab[piece[:stop]] = len(vocab)
                merges.append((piece[: stop - 1], piece[stop - 1]))
    if unknown := options.get("unk_token"):
        vocab[unknown] = len(vocab)
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def with_steps(made: Tokenizer, normalizer: Any = None, pre_tokenizer: Any = None, *added: AddedToken) -> Tokenizer:
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    made.add_tokens(list(added))
    made.decoder = decoders.Fuse()
    return made


def unigram(letters: list[str], pieces: list[str]) -> Tokenizer:
    vocab = [("<unk>", 0.0), *((piece, -float(i)) for i, piece in enumerate(dict.fromkeys([*letters, *pieces])))]
    return Tokenizer(models.Unigram(vocab, unk_id=0))


FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
SPACES = normalizers.Replace(" ", "▁")
SOME = LETTERS[:8]


@cache
def made(name: str) -> Tokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab_with_fallback = bpe([*SOME], PIECES, fuse_unk=True, unk_token="<unk>").get_vocab()
    for piece in FALLBACK:
        vocab_with_fallback.setdefault(piece, len(vocab_with_fallback))
    match name:
        case "bytes":
            return with_steps(bpe(bytes_, ["abc", "ĠĠĠĠ", "Ã©"]), None, byte_level)
        case "bytes, nfc":
            return with_steps(bpe(bytes_, ["abc", "Ã©"]), normalizers.NFC(), byte_level)
        case "bytes, some missing":
            return with_steps(bpe(bytes_[:200], ["abc", "Ã©"]), None, byte_level)
        case "bytes, added":
            return with_steps(bpe(bytes_, ["abc"]), None, byte_level, AddedToken("<xabc日本xx>", normalized=False))
        case "characters":
            return with_steps(bpe(LETTERS, PIECES, fuse_unk=True, unk_token="<unk>"), SPACES)
        case "characters, dropped when unknown":
            return with_steps(bpe(SOME, PIECES), SPACES)
        case "characters, spaces as they are":
            return with_steps(bpe([*LETTERS, *"xyz"], PIECES))
        case "characters, unknown fused":
            return with_steps(bpe(SOME, PIECES, fuse_unk=True, unk_token="<unk>"), SPACES)
        case "characters, bytes for the unknown":
            merges = [("a", "b"), ("ab", "c")]
            model = models.BPE(vocab=vocab_with_fallback, merges=merges, byte_fallback=True, unk_token="<unk>")
            return with_steps(Tokenizer(model), normalizers.Sequence([normalizers.Prepend("▁"), SPACES]))
        case "unigram":
            return with_steps(unigram(SOME, PIECES), None, pre_tokenizers.Metaspace())
        case "blanks swallowed":
            return with_steps(bpe(LETTERS, PIECES), SPACES, None, AddedToken("<x>", lstrip=True, rstrip=True))
        case "blanks collapsed":
            return with_steps(bpe(LETTERS, PIECES), normalizers.Replace(" ", ""))
        case "compatibility":
            return with_steps(bpe(bytes_, PIECES), normalizers.NFKC(), byte_level)
        case "accents stripped":
            return with_steps(bpe(bytes_, PIECES), normalizers.StripAccents(), byte_level)
        case "blanks dropped":
            return with_steps(bpe(LETTERS, PIECES), None, pre_tokenizers.WhitespaceSplit())
        case "pieces removed":
            return with_steps(bpe(LETTERS, PIECES), None, pre_tokenizers.Split("a", "removed"))
        case "words":
            return with_steps(Tokenizer(models.WordLevel({"<unk>": 0, "abc": 1}, "<unk>")))
        case "smollm2":
            return tokenizer().backend_tokenizer
    return zoo.tokenizer(name).backend_tokenizer


@cache
def bound_of(name: str) -> LeastTokens | None:
    return LeastTokens.of(made(name))


BOUNDED = ["bytes", "bytes, nfc", "bytes, some missing", "bytes, added", "characters", "characters, unknown fused",
           "characters, dropped when unknown", "characters, spaces as they are", "characters, bytes for the unknown",
           "unigram", "smollm2", "qwen3", "gemma3"]  # fmt: skip
UNBOUNDED = ["blanks swallowed", "blanks collapsed", "compatibility", "accents stripped", "blanks dropped",
             "pieces removed", "words"]  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
@settings(deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_the_bound(name: str, text: str) -> None:
    bound = bound_of(name)
    assert bound is not None
    tokens = made(name).encode(replace_surrogates(text), add_special_tokens=False).ids
    assert 0 <= bound.of_text(text) <= len(tokens)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizers_that_may_shrink_a_text_have_no_bound(name: str) -> None:
    assert LeastTokens.of(made(name)) is None


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "gemma3"])
@pytest.mark.parametrize("text", ["The quick brown fox jumps. ", "日本語のテキスト ", " ", "x", '{"a": 1.5}, '])
def test_the_bound_is_close_enough_to_refuse_megabytes(name: str, text: str) -> None:
    bound = bound_of(name)
    assert bound is not None
    assert bound.of_text(text * (15_000_000 // len(text))) > 100_000


def test_the_bound_is_zero_for_text_that_nfc_may_shrink() -> None:
    bound = LeastTokens.of(made("bytes, nfc"))
    assert bound is not None
    assert bound.of_text("e\u0301" * 1000) == 0
    assert bound.of_text("é" * 1000) > 900


def test_the_bound_of_an_encoder_is_cached() -> None:
    encoder = ContentSafeEncoder(tokenizer())
    assert LeastTokens.for_encoder(encoder) is LeastTokens.for_encoder(encoder)


@pytest.mark.parametrize(
    ("name", "symbol", "weight"),
    [
        ("bytes", "a", 1 / 3),
        ("bytes", " ", 1 / 4),
        ("bytes", "é", 1 / 2 + 1 / 2),
        ("bytes", "z", 1),
        ("bytes, added", "a", 1 / 14),
        ("characters", "a", 1 / 4),
        ("characters", " ", 1 / 4),
        ("characters", "日", 1 / 2),
        ("characters", "z", 0),
        ("characters, spaces as they are", "z", 1),
        ("characters, spaces as they are", " ", 0),
        ("characters, bytes for the unknown", "🙂", 1 / 6),
        ("unigram", "a", 1 / 4),
        ("unigram", " ", 1 / 4),
        ("unigram", "日", 0),
        ("unigram", "🙂", 0),
        ("a metaspace, then digits", "a", 1 / 4),
        ("a metaspace, then digits", " ", 1 / 4),
        ("spaces of their own", " ", 1 / 2),
        ("spaces of their own", "a", 1 / 2),
    ],
)
def test_a_symbol_weighs_its_share_of_the_longest_token_with_it(name: str, symbol: str, weight: float) -> None:
    found = LeastTokens.of(special(name))
    assert found is not None
    for count in (9, 60, 1300):
        assert found.of_text(symbol * count) == pytest.approx(int(count * weight * (1 - 1e-6)), abs=0)


def special(name: str) -> Tokenizer:
    if name == "spaces of their own":
        return with_steps(bpe([*"ab "], ["a ", "ab"]))
    if name == "a metaspace, then digits":
        steps = [pre_tokenizers.Metaspace(), pre_tokenizers.Digits(individual_digits=True)]
        return with_steps(unigram(SOME, PIECES), None, pre_tokenizers.Sequence(steps))
    return made(name)


def test_a_metaspace_of_another_character_has_no_bound() -> None:
    assert LeastTokens.of(with_steps(unigram(SOME, PIECES), None, pre_tokenizers.Metaspace("_"))) is None
