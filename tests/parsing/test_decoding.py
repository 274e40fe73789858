"""Decoding ids to text with the first character of each token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from support.byte_level import MARKUP, shared, wrapped
from support.growth import expect_linear
from support.templates import NAMES, tokenizer_of
from tito_core.parsing.markup import DecodedIds, decoding


@pytest.mark.parametrize("name", NAMES)
def test_any_ids_decode_as_the_tokenizer_decodes_them(name: str) -> None:
    tokenizer = tokenizer_of(name)
    decode = decoding(tokenizer)
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}

    @settings(deadline=None, max_examples=30)
    @given(st.lists(st.integers(0, len(tokenizer) + 300) | st.sampled_from(sorted(added))))
    def check(ids: list[int]) -> None:
        text, starts = decode(ids)
        assert text == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        assert len(starts) == len(ids)
        assert starts == sorted(starts)
        for token, start in zip(ids, starts, strict=True):  # broken bytes do not move a control token
            assert text.startswith(added.get(token, ""), start)

    check()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=15)
@given(text=st.text("aé漢🙂 \n<", max_size=20))
def test_each_token_has_the_index_of_its_first_character(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    found, starts = decoding(tokenizer)(ids)
    assert found == text
    prefixes = [tokenizer.backend_tokenizer.decode(ids[:i]) for i in range(len(ids))]
    whole = [
        len(prefix.rstrip("\ufffd")) for prefix in prefixes
    ]  # the text has no U+FFFD, so these are incomplete characters
    assert starts == whole


@pytest.mark.parametrize(
    ("pieces", "text", "starts"),
    [
        ([b"\xf0\x9f", "<tool_call>"], "\ufffd<tool_call>", [0, 0, 1]),
        ([b"\xf0\x9f", b"\x99\x82", "a"], "🙂a", [0, 0, 0, 0, 1]),
        ([b"a\xc3", b"b"], "a\ufffdb", [0, 1, 2]),
        ([b"\xed\xab", "a"], "\ufffd\ufffda", [0, 0, 2]),
        ([b"\xff\xff", "a"], "\ufffd\ufffda", [0, 1, 2]),
        ([b"\xef\xbf\xbd", "a", b"\xc3"], "\ufffda\ufffd", [0, 0, 0, 1, 2]),
        ([b"\xe2\x82", b"\xe2\x82\xac"], "\ufffd€", [0, 0, 1, 1, 1]),
        ([b"\xc3", 10**6, b"\xa9"], "é", [0, 0, 0]),
        ([10**6, -1, 2**40, "a"], "a", [0, 0, 0, 0]),
        ([], "", []),
    ],
)
def test_broken_and_split_characters(pieces: list[Any], text: str, starts: list[int]) -> None:
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            ids += [BYTE_IDS[value] for value in piece]
        else:
            ids.append(piece if isinstance(piece, int) else shared().convert_tokens_to_ids(piece))
    assert decoding(shared())(ids) == (text, starts)


def test_spans_of_characters_are_spans_of_tokens() -> None:
    ids = [*(BYTE_IDS[value] for value in "é<".encode()), shared().convert_tokens_to_ids("<think>"), 10**6]
    decoded = DecodedIds(decoding(shared()), ids)
    assert decoded.text == "é<<think>"
    assert [decoded.span_of(start, stop) for start, stop in ((0, 1), (1, 2), (2, 9), (0, 9))] == [
        (1, 2),
        (2, 3),
        (3, 4),
        (1, 4),
    ]


def pieces_with_blanks() -> Tokenizer:
    """Return a SentencePiece-like tokenizer: blanks are part of pieces, and the first one is dropped."""
    alphabet = ["▁", *"abcé<>/_tolk", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({piece: i for i, piece in enumerate(alphabet)}, [], byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


def words() -> Tokenizer:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "c": 3, ".": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


@pytest.mark.parametrize("make", [pieces_with_blanks, words])
def test_other_decoders(make: Any) -> None:
    backend = make()
    backend.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    tokenizer = wrapped(backend)
    ids = backend.encode("a ab<tool_call>c a 🙂c</tool_call> c", add_special_tokens=False).ids
    text, starts = decoding(tokenizer)(ids)
    assert text == backend.decode(ids, skip_special_tokens=False)
    assert starts == sorted(starts)
    for tag in ("<tool_call>", "</tool_call>"):
        assert text.startswith(tag, starts[ids.index(backend.token_to_id(tag))])


@pytest.mark.parametrize("broken", [False, True])
def test_time_grows_with_the_number_of_ids(broken: bool) -> None:
    tokenizer = shared()
    decode = decoding(tokenizer)
    ids = [*tokenizer.encode("é the <think> ", add_special_tokens=False), *([BYTE_IDS[0xC3]] if broken else [])]
    decode(ids)

    expect_linear(lambda count: decode(ids * (count * 10_000 // len(ids))))


def _byte_ids() -> dict[int, int]:
    """Return the id of each byte, found by encoding characters whose UTF-8 contains it."""
    table = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {}
    for point in [
        *range(0x80),
        *range(0x80, 0x800),
        0x800,
        0x1000,
        *range(0x1000, 0x10000, 0x1000),
        *range(0x10000, 0x110000, 0x10000),
    ]:
        if 0xD800 <= point < 0xE000:
            continue
        [(mapped, _)] = table.pre_tokenize_str(chr(point))
        found |= dict(zip(chr(point).encode(), mapped, strict=True))
    return {value: shared().convert_tokens_to_ids(character) for value, character in found.items()}


BYTE_IDS = _byte_ids() | {0xFF: shared().convert_tokens_to_ids("ÿ")}
