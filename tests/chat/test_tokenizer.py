"""Loading tokenizers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from huggingface_hub import constants

from support.byte_level import shared
from tito_core.chat.tokenizer import HUB_WITHIN_S, TokenizerError, load_tokenizer


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


Asked = list[tuple[str, bool]]
"""Name and `local_files_only` of each attempt to load."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Nothing is in the hub's cache; the hub itself has the model."""
    attempts: Asked = []

    def loads(name: str, *, local_files_only: bool = False) -> Any:
        attempts.append((name, local_files_only))
        if local_files_only:
            raise OSError("nothing in the cache\nand more lines")
        return shared()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", loads)
    return attempts


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], None]) -> list[tuple[str, float]]:
    seen: list[tuple[str, float]] = []

    def head(url: str, *, timeout: float) -> None:
        seen.append((url, timeout))
        answer()

    monkeypatch.setattr(httpx, "head", head)
    return seen


def test_what_is_not_in_the_cache_comes_from_the_hub_once_that_answers(
    monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    seen = answering(monkeypatch, lambda: None)
    assert load_tokenizer("some/model") is shared()
    assert asked == [("some/model", True), ("some/model", False)]
    assert seen == [(constants.ENDPOINT, HUB_WITHIN_S)]


def test_a_hub_that_does_not_answer_is_not_asked_for_a_minute(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    def fail() -> None:
        raise httpx.ConnectError("no route")

    answering(monkeypatch, fail)
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer("some/model")
    assert str(refused.value) == (
        "The tokenizer 'some/model' is in no folder and not in the model hub's cache, and the hub cannot be reached "
        "(no route): give a folder with tokenizer.json, or try again with a connection."
    )
    assert asked == [("some/model", True)]


def test_what_is_in_the_cache_is_loaded_without_asking_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: shared())
    monkeypatch.setattr(httpx, "head", None)  # would be called
    assert load_tokenizer("some/model") is shared()


@pytest.mark.parametrize("relative", [False, True])
def test_a_folder_is_never_asked_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: Asked, relative: bool
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    name = tmp_path.name if relative else tmp_path
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(name)
    assert asked == [(str(name), True)]
    assert str(refused.value) == (
        f"No tokenizer loads from {str(name)!r} (nothing in the cache): give a model's name on the hub, or a folder "
        "with tokenizer.json and a chat template."
    )


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "../nowhere", "~/nowhere", Path("/no/such/folder")])
def test_a_path_without_a_folder_is_told_and_never_asked_of_the_hub(name: Any, asked: Asked) -> None:
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(name)
    assert str(refused.value) == f"There is no folder {str(name)!r} to load a tokenizer from: check the path."
    assert asked == []


def test_an_error_without_words_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(TokenizerError, match=r" \(KeyError\(\)\): give a model's name"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("chosen", "found"), [(None, "1"), ("0", "0")])
def test_transformers_is_quiet_unless_somebody_wants_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str | None, found: str
) -> None:
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "will be undone")
    if chosen is None:
        monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    else:
        monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", chosen)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: shared())
    load_tokenizer(tmp_path)
    assert os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] == found
