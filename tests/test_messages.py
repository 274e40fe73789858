"""Bad input raises at once: the error has the option, the value and the remedy, in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.scripted import Says, engine_of, policy_of, tokenizer
from tito_conformance.testing import ScriptedServer
from tito_core import TITOModel
from tito_core.backend import BadRequestError, EngineConnectionError, UnknownBackendError
from tito_core.backend.values import InvalidValueError
from tito_core.chat.tokenizer import TokenizerError
from tito_core.parsing import UnknownParserError


def build(**changes: Any) -> TITOModel:
    settings = {"backend": "vllm", "base_url": "http://127.0.0.1:9", "tokenizer": tokenizer(), "patience_s": 0}
    return TITOModel(**{**settings, **changes})


BAD_INPUT: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    # the server
    ({}, EngineConnectionError, ("vllm", "http://127.0.0.1:9", "running")),
    ({"base_url": "localhost:8000"}, EngineConnectionError, ("http://localhost:8000",)),
    ({"base_url": "http://no.such.host.invalid"}, EngineConnectionError, ("no.such.host.invalid",)),
    ({"base_url": 5}, InvalidValueError, ("base_url", "5")),
    ({"backend": "trtllm"}, UnknownBackendError, ("'trtllm'", "sglang", "vllm")),
    ({"backend": None}, InvalidValueError, ("backend", "'sglang'", "'vllm'", "None")),
    # the tokenizer and its template
    ({"tokenizer": "/no/such/folder"}, TokenizerError, ("/no/such/folder", "path")),
    ({"tokenizer": "x" * 5000}, TokenizerError, ("5000",)),
    ({"tokenizer": 5}, TokenizerError, ("tokenizer", "int", "name")),
    ({"tokenizer": tokenizer().backend_tokenizer}, TokenizerError, ("AutoTokenizer.from_pretrained",)),
    ({"parser": "hermez"}, UnknownParserError, ("'hermez'", "auto", "hermes")),
    ({"parser": []}, InvalidValueError, ("parser", "'auto'", "[]")),
    ({"tool_calls": "loose"}, InvalidValueError, ("tool_calls", "'strict'", "'lenient'", "'loose'")),
    ({"template_arguments": "x"}, ValueError, ("template_arguments", "dict", "'x'")),
    ({"template_arguments": {1: 2}}, ValueError, ("template_arguments", "dict")),
    ({"template_arguments": {"messages": []}}, ValueError, ("template_arguments", "messages")),
    ({"template_arguments": {"chat_template": "{{ 'X' }}"}}, ValueError, ("template_arguments", "chat_template")),
    ({"template_arguments": {"tokenize": False}}, ValueError, ("template_arguments", "tokenize")),
    ({"template_arguments": {"add_generation_prompt": False}}, ValueError, ("add_generation_prompt",)),
    # sampling parameters
    ({"sampling": 5}, InvalidValueError, ("sampling", "dict", "5")),
    ({"sampling": {"temprature": 1}}, InvalidValueError, ("'temprature'", "'temperature'")),
    ({"sampling": {1: 2}}, InvalidValueError, ("sampling parameter", "1")),
    ({"sampling": {"temperature": -1}}, InvalidValueError, ("temperature", "0", "-1")),
    ({"sampling": {"stop": 5}}, InvalidValueError, ("stop", "list", "5")),
    ({"sampling": {"extra": {"n": 2}}}, InvalidValueError, ("n", "rollouts")),
    ({"sampling": {"grammar": {"kind": "lark", "value": "x"}}}, InvalidValueError, ("'json_schema'", "'lark'")),
    ({"sampling": {"grammar": {"kind": "regex"}}}, InvalidValueError, ("grammar.value",)),
    # other options
    ({"optional_outputs": "all"}, InvalidValueError, ("dict", "'all'")),
    ({"optional_outputs": {"top_logprobs": -1}}, InvalidValueError, ("top_logprobs", "0", "-1")),
    ({"optional_outputs": {"routed_experts": 5}}, InvalidValueError, ("routed_experts", "5")),
    ({"stream": "no"}, InvalidValueError, ("stream", "True", "False", "'no'")),
    ({"store": "/"}, InvalidValueError, ("store", "'/'", "path")),
    ({"store": "/no/such/folder/x.tito"}, InvalidValueError, ("store", "/no/such/folder/x.tito", "folder")),
    ({"store": 5}, InvalidValueError, ("store", "path", "5")),
    ({"timeout_s": "x"}, InvalidValueError, ("timeout_s", "seconds", "'x'")),
    ({"timeout_s": 10**400}, InvalidValueError, ("timeout_s", "seconds", "1000")),
    ({"connect_timeout_s": 0}, InvalidValueError, ("connect_timeout_s", "positive", "0")),
    ({"connect_timeout_s": float("nan")}, InvalidValueError, ("connect_timeout_s", "positive", "nan")),
    ({"turn_timeout_s": 10**5000}, InvalidValueError, ("turn_timeout_s", "int")),
    ({"model": "a", "model_id": "b"}, InvalidValueError, ("model='a'", "model_id='b'", "one of them")),
    ({"model": "a", "model_id": "a"}, InvalidValueError, ("model='a'", "model_id='a'")),
    ({"model": 5}, InvalidValueError, ("model", "name", "5")),
    ({"patience_s": -1}, InvalidValueError, ("patience_s", "0", "-1")),
    ({"max_connections": -1}, InvalidValueError, ("max_connections", "0", "-1")),
    ({"patience_s": "3"}, InvalidValueError, ("patience_s", "'3'")),
    ({"api_key": 5}, InvalidValueError, ("api_key", "string")),
    ({"model_id": 5}, InvalidValueError, ("model", "name")),
    # names
    ({"temperature": 0}, InvalidValueError, ("temperature", "sampling={'temperature'")),
    ({"temprature": 3}, InvalidValueError, ("sampling={'temperature'",)),
    ({"histry": "fork"}, InvalidValueError, ("TITOModel", "'histry'", "'history'")),
    ({"bse_url": "x"}, InvalidValueError, ("'bse_url'", "'base_url'")),
    ({"base_url": ["http://127.0.0.1:9"], "foo": 1}, InvalidValueError, ("'foo'",)),
]


def check_message(error: BaseException, *parts: str) -> None:
    """Check that an error is one line with these values and remedies."""
    message = str(error)
    assert [part for part in parts if part not in message] == [], message
    assert "\n" not in message
    assert len(message) < 1000


@pytest.mark.parametrize(("changes", "kind", "parts"), BAD_INPUT)
def test_bad_input_is_named_with_its_value_and_the_remedy(
    changes: dict[str, Any], kind: type[Exception], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        build(**changes)
    check_message(caught.value, *parts)


def test_an_api_key_is_never_shown() -> None:
    with pytest.raises(InvalidValueError) as caught:
        build(api_key=52345)
    assert "52345" not in str(caught.value)


class Unshowable:
    """A value whose `__repr__` raises."""

    def __repr__(self) -> str:
        raise KeyError("no words")


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


HOSTILE = {"unshowable": Unshowable(), "nested": nested(100_000), "digits": 10**5000}
OPTIONS = [
    *("backend", "base_url", "tokenizer", "model_id", "sampling", "parser", "template_arguments", "content_tokens"),
    "tool_calls",
    *("context_window_limit", "history", "malformed_calls", "thinking", "on_abort"),
    *(
        "turn_timeout_s",
        "max_total_tokens",
        "stream",
        "verify_echo",
        "store",
        "optional_outputs",
        "api_key",
        "timeout_s",
    ),
    *("admin_api_key", "headers", "connect_timeout_s", "max_connections", "patience_s", "unheard_of"),
]
INSIDE: list[dict[str, Any]] = [
    *(
        {"sampling": {name: "hostile"}}
        for name in ("temperature", "stop", "seed", "grammar", "extra", "max_new_tokens")
    ),
    {"sampling": {"extra": {"field": "hostile"}}},
    {"sampling": {"extra": {"logit_bias": "hostile"}}},
    {"template_arguments": {"field": "hostile"}},
    {"optional_outputs": {"top_logprobs": "hostile"}},
    {"base_url": ["hostile"]},
]


def put(place: Any, value: Any) -> Any:
    """Replace "hostile" in a place by a value."""
    if isinstance(place, dict):
        return {key: put(item, value) for key, item in place.items()}
    if isinstance(place, list):
        return [put(item, value) for item in place]
    return value if place == "hostile" else place


WHOLE = ("context_window_limit", "max_total_tokens", "max_connections", "max_new_tokens")
"""Options that allow any large integer."""
CASES = [
    pytest.param(place, value, id=f"{place}-{kind}")
    for place in (*({name: "hostile"} for name in OPTIONS), *INSIDE)
    for kind, value in HOSTILE.items()
    if not (kind == "digits" and any(name in str(place) for name in WHOLE))
]


@pytest.mark.parametrize(("place", "value"), CASES)
def test_a_value_without_a_repr_is_refused_by_its_option(place: dict[str, Any], value: Any) -> None:
    with pytest.raises((ValueError, EngineConnectionError)) as caught:
        build(**put(place, value))
    check_message(caught.value, *([next(iter(place))] if type(caught.value) is ValueError else []))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"temperature": 0}, ("sampling={'temperature'",)),
        ({"max_total_token": 5}, ("'max_total_token'", "'max_total_tokens'")),
        ({"ledger": "x"}, ("ledger", "Ledger", "None", "str")),
    ],
)
def test_bad_options_of_a_rollout(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidValueError) as caught:
        policy_of("vllm").model(**options)
    check_message(caught.value, *parts)


def test_a_model_needs_a_policy() -> None:
    with pytest.raises(InvalidValueError) as caught:
        TITOModel.of(None)  # type: ignore[arg-type]
    check_message(caught.value, "policy", "Policy.connect", "NoneType")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"temperature": "hot"}, ("temperature", "'hot'")),
        ({"sampling": 5}, ("sampling", "dict", "5")),
        ({"context_window_limit": "x"}, ("context_window_limit", "tokens", "'x'")),
        ({"history": "error"}, ("sampling parameter", "'history'")),
    ],
)
def test_a_bad_change_changes_nothing(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    model = policy_of("vllm").model(sampling={"temperature": 0.5})
    before = model.get_config()
    with pytest.raises(ValueError) as caught:  # checked below
        model.update_config(**changes)
    check_message(caught.value, *parts)
    assert model.get_config() == before


def test_one_stop_string_needs_no_list() -> None:
    model = policy_of("vllm").model(sampling={"stop": "END"})
    assert model.get_config()["sampling"]["stop"] == ("END",)
    model.update_config(stop="X")
    assert model.get_config()["sampling"]["stop"] == ("X",)


def test_an_unknown_tokenizer_is_refused_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked once, as tests/chat/test_tokenizer.py counts: its client would retry for most of a minute."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TokenizerError, match=r"nobody/has-this.*the hub cannot be reached"):
        build(tokenizer="nobody/has-this")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_wrong_model_name_lists_those_served(kind: str) -> None:
    with (
        ScriptedServer(engine_of(kind, Says(""))) as server,
        pytest.raises(BadRequestError, match=r"'nope'.*'scripted'"),
    ):
        build(backend=kind, base_url=server.base_url, model_id="nope")


@pytest.mark.parametrize(("kind", "other"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_the_wrong_kind_of_server_names_the_right_backend(kind: str, other: str) -> None:
    with (
        ScriptedServer(engine_of(kind, Says(""))) as server,
        pytest.raises(BadRequestError, match=f"backend='{kind}'"),
    ):
        build(backend=other, base_url=server.base_url)


def test_an_unsupported_python_is_named_by_make(tmp_path: Path) -> None:
    python = tmp_path / "python3.9"
    python.write_text(
        f"#!{sys.executable}\n"
        "import sys\nsys.version_info = (3, 9, 18, 'final', 0)\nsys.executable = 'python3.9'\nexec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    root = Path(__file__).parent.parent
    done = subprocess.run(
        ["make", "-B", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert re.search(r"3\.11 to 3\.14.*python3\.9.* 3\.9", done.stderr)
