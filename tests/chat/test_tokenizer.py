"""Loading tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.byte_level import shared
from tito_core.chat.tokenizer import TokenizerError, load_tokenizer


def test_a_tokenizer_is_given_back() -> None:
    assert load_tokenizer(shared()) is shared()


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    shared().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).get_vocab() == shared().get_vocab()


@pytest.mark.parametrize("content", [None, "{", '{"model": {}}', '{"added_tokens": [], "model": {}}'])
def test_what_does_not_load_is_one_sentence(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="No tokenizer loads from") as refused:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(refused.value)
