"""Tokenizers from GGUF files that hold only a vocabulary, as llama.cpp ships them.

The vocabulary, merges, scores and token types come from the file; the pre-tokenizer is rebuilt from its name. It may
differ slightly from the model's, because tests use the same tokenizer on both sides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tito_engines.models.smollm2 import read_header

CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens (llama.cpp's `llama_token_type`)."""
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": _CASELESS + r"\p{N}{1,3}" + _REST,
    "qwen2": _CASELESS + r"\p{N}" + _REST,
    "qwen35": _CASELESS + r"\p{N}" + _REST,
}
_DIGITS = ("command-r", "starcoder", "refact", "deepseek-coder", "deepseek-llm")
"""Pre-tokenizers that split digits."""


def from_gguf(path: Path) -> Any:
    """Load a tokenizer.

    Raises:
        ValueError: The model is neither byte-level BPE nor SentencePiece BPE.
    """
    with path.open("rb") as stream:
        header = {key.removeprefix("tokenizer.ggml."): value for key, value in read_header(stream).items()}
    tokens: Any = header["tokens"]
    make = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece}.get(str(header["model"]))
    if make is None:
        raise ValueError(f"{path.name} has an unsupported tokenizer model {header['model']!r}.")
    backend = make(header, tokens)
    kinds: Any = header["token_type"]
    pairs = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text, kind in pairs if kind == CONTROL])
    backend.add_tokens([AddedToken(text, normalized=False) for text, kind in pairs if kind == USER_DEFINED])
    names = {
        f"{name}_token": tokens[header[f"{name}_token_id"]] for name in ("bos", "eos") if f"{name}_token_id" in header
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def _byte_level(header: Any, tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in header["merges"]]
    vocabulary = {text: number for number, text in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    split = _SPLITS.get(header.get("pre", ""))
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    if header.get("pre") in _DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(header: Any, tokens: list[str]) -> Tokenizer:
    vocabulary = {text: number for number, text in enumerate(tokens)}
    merges = (
        [tuple(merge.split(" ")) for merge in header["merges"]] if "merges" in header else _merges(header, vocabulary)
    )
    unknown = tokens[header.get("unknown_token_id", 0)]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend("▁")] if header.get("add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges(header: Any, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary: each pair of pieces that makes a piece, the best piece first."""
    scores: Any = header["scores"]
    found = []
    for piece, number in vocabulary.items():
        local = [
            (piece[:at], piece[at:])
            for at in range(1, len(piece))
            if piece[:at] in vocabulary and piece[at:] in vocabulary
        ]
        local.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[number], pair) for pair in local]
    return [pair for _, pair in sorted(found, key=lambda scored: -scored[0])]
