"""Loading tokenizers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers
from huggingface_hub import constants

from support.byte_level import shared
from tito_core.chat.tokenizer import HUB_TIMEOUT_S, TokenizerError, load_tokenizer


def test_a_tokenizer_object_is_returned() -> None:
    assert load_tokenizer(shared()) is shared()


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    shared().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).get_vocab() == shared().get_vocab()


@pytest.mark.parametrize("content", [None, "{", '{"added_tokens": [], "model": {}}'])
def test_the_error_for_a_broken_folder_has_one_line(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="Cannot load a tokenizer from") as refused:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(refused.value)


Attempts = list[tuple[str, bool]]
"""Name and `local_files_only` of each attempt to load."""


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    """Record attempts to load: the hub's cache is empty, the hub has the model."""
    made: Attempts = []

    def loads(name: str, *, local_files_only: bool = False) -> Any:
        made.append((name, local_files_only))
        if local_files_only:
            raise OSError("nothing in the cache\nand more lines")
        return shared()

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", loads)
    return made


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], None]) -> list[tuple[str, float]]:
    seen: list[tuple[str, float]] = []

    class Client:
        def head(self, url: str, *, timeout: float) -> None:
            seen.append((url, timeout))
            answer()

    monkeypatch.setattr(huggingface_hub, "get_session", Client)
    return seen


def test_a_tokenizer_outside_the_cache_is_loaded_from_the_hub(
    monkeypatch: pytest.MonkeyPatch, attempts: Attempts
) -> None:
    seen = answering(monkeypatch, lambda: None)
    assert load_tokenizer("some/model") is shared()
    assert attempts == [("some/model", False)]
    assert seen == [(constants.ENDPOINT, HUB_TIMEOUT_S)]


def test_an_unreachable_hub_is_tried_once(monkeypatch: pytest.MonkeyPatch, attempts: Attempts) -> None:
    def fail() -> None:
        raise OSError("no route")

    answering(monkeypatch, fail)
    with pytest.raises(TokenizerError, match=r"'some/model' .*no route.*tokenizer\.json"):
        load_tokenizer("some/model")
    assert attempts == []


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no host be looked up, also where the error would be caught."""
    sought: list[object] = []

    def refuse(*address: object, **_: object) -> None:
        sought.append(address)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    if hasattr(constants, "AGENT_HARNESSES_PATH"):  # huggingface_hub 1.3 asks for no list of agents
        monkeypatch.setattr("huggingface_hub.utils._detect_agent._registry", None)  # what an earlier request kept
        monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", "/no/such/file")
    yield
    assert sought == []


@pytest.mark.parametrize("local", [False, True])
def test_a_cached_tokenizer_is_loaded_without_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_network: None, local: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--some--model"
    shared().save_pretrained(model / "snapshots/0a")
    (model / "refs").mkdir()
    (model / "refs/main").write_text("0a")
    loaded = load_tokenizer("some/model", local_files_only=local)
    assert loaded.get_vocab() == shared().get_vocab()
    assert loaded.name_or_path == "some/model"


@pytest.mark.parametrize("name", ["some/model", "..", "a b", "-/-", "x/y/z"])
def test_a_tokenizer_that_is_not_on_this_machine_is_refused_without_the_hub(no_network: None, name: str) -> None:
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(name, local_files_only=True)
    assert repr(name) in str(refused.value)


@pytest.mark.parametrize("relative", [False, True])
def test_a_folder_is_never_loaded_from_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempts: Attempts, relative: bool
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    name = tmp_path.name if relative else tmp_path
    with pytest.raises(TokenizerError) as refused:
        load_tokenizer(name)
    assert attempts == [(str(name), True)]
    assert f"{str(name)!r} (nothing in the cache)" in str(refused.value)
    assert "tokenizer.json" in str(refused.value)


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere", Path("/no/such/folder")])
def test_a_missing_folder_is_refused_without_the_hub(name: Any, attempts: Attempts) -> None:
    with pytest.raises(TokenizerError, match=f"{str(name)!r} does not exist"):
        load_tokenizer(name)
    assert attempts == []


def test_an_error_without_a_message_is_shown_as_its_repr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(TokenizerError, match=r"KeyError\(\)"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("chosen", "found"), [(None, "1"), ("0", "0")])
def test_transformers_advisory_warnings_are_off_by_default(
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


def test_an_unknown_built_in_name_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch, attempts: Attempts) -> None:
    def fail() -> None:
        raise OSError("no route")

    answering(monkeypatch, fail)
    for name, near in (("smolm2", "Did you mean 'smollm2'"), ("zzz", r"\.\n")):
        with pytest.raises(TokenizerError, match=rf"Built-in names: .*qwen3-tiny.*smollm2.*{near}"):
            load_tokenizer(name)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer("org/smolm2")
    assert "Built-in" not in str(caught.value)
