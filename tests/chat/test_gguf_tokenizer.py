"""Tokenizers from small GGUF vocabularies."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from support.gguf_tokenizer import CONTROL, from_gguf

NORMAL = 1
STRING, ARRAY, INT32, FLOAT32 = 8, 9, 5, 6


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> tuple[int, bytes]:
    match value:
        case str():
            return STRING, _text(value)
        case int():
            return INT32, struct.pack("<i", value)
        case float():
            return FLOAT32, struct.pack("<f", value)
    items = [_value(item) for item in value]
    return ARRAY, struct.pack("<IQ", items[0][0], len(items)) + b"".join(data for _, data in items)


def written(folder: Path, **entries: Any) -> Path:
    body = b""
    for key, value in entries.items():
        kind, data = _value(value)
        body += _text(f"tokenizer.ggml.{key}") + struct.pack("<I", kind) + data
    path = folder / "ggml-vocab-small.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + body)
    return path


def test_a_byte_level_vocabulary_splits_digits_and_knows_its_control_tokens(tmp_path: Path) -> None:
    tokens = ["<|end|>", "a", "b", "ab", "1", "2", "12", "Ġ"]
    kinds = [CONTROL, *[NORMAL] * 7]
    given = {"tokens": tokens, "token_type": kinds, "merges": ["a b", "1 2"], "eos_token_id": 0}
    tokenizer = from_gguf(written(tmp_path, model="gpt2", pre="command-r", **given))
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer("ab 12<|end|>", add_special_tokens=False).input_ids == [3, 7, 4, 5, 0]
    whole = from_gguf(written(tmp_path, model="gpt2", pre="llama-bpe", **given))
    assert whole("12", add_special_tokens=False).input_ids == [6]


def test_a_sentencepiece_vocabulary_merges_its_best_pieces_first(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "▁", "a", "b", "c", "ab", "bc", "▁a"]
    scores = [0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0]
    kinds = [2, CONTROL, *[NORMAL] * 7]
    path = written(tmp_path, model="llama", tokens=tokens, scores=scores, token_type=kinds, bos_token_id=1)
    tokenizer = from_gguf(path)
    assert tokenizer.bos_token == "<s>"
    assert tokenizer("abc", add_special_tokens=False).input_ids == [8, 7]
    assert tokenizer.decode([8, 7]) == "abc"


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bert"):
        from_gguf(written(tmp_path, model="bert", tokens=["a"], token_type=[1]))
