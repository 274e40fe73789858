"""What a user gets wrong is named in one sentence, at the earliest place, with what to do."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strands_tito.testing import ScriptedServer
from support.scripted import Says, engine_of, policy_of, tokenizer
from tito_core import TITOModel
from tito_core.backend import BadRequestError, EngineConnectionError, UnknownBackendError
from tito_core.backend.typed_values import InvalidValueError
from tito_core.chat.tokenizer import TokenizerError
from tito_core.parsing import UnknownParserError


def build(**changes: Any) -> TITOModel:
    settings = {"backend": "vllm", "base_url": "http://127.0.0.1:9", "tokenizer": tokenizer(), "max_attempts": 1}
    return TITOModel(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, EngineConnectionError, r"No connection to vllm at http://127.0.0.1:9.*Is the server running"),
        ({"base_url": "localhost:8000"}, EngineConnectionError, "give an address like 'http://localhost:8000'"),
        ({"base_url": "http://no.such.host.invalid"}, EngineConnectionError, "host.s name"),
        ({"backend": "trtllm"}, UnknownBackendError, "no backend 'trtllm'. Installed backends: sglang, vllm"),
        ({"tokenizer": "/no/such/folder"}, TokenizerError, "no folder '/no/such/folder'.*check the path"),
        ({"parser": "hermez"}, UnknownParserError, "no tool parser 'hermez'. Known parsers: auto, cohere_command"),
        ({"sampling": {"temprature": 1}}, InvalidValueError, "did you mean 'temperature'"),
        ({"sampling": {"extra": {"n": 2}}}, InvalidValueError, "For n samples, make n rollouts"),
        (
            {"sampling": {"temperature": -1}},
            InvalidValueError,
            "^temperature must be greater than or equal to 0, not -1",
        ),
        ({"sampling": {"stop": 5}}, InvalidValueError, "^stop must be a list, not 5"),
        ({"sampling": {"grammar": {"kind": "lark", "value": "x"}}}, InvalidValueError, "'json_schema'.*, not 'lark'"),
        ({"sampling": {"grammar": {"kind": "regex"}}}, InvalidValueError, "grammar.value is missing"),
        ({"sampling": 5}, InvalidValueError, "sampling must be a dict, such as .*, not 5"),
        ({"sampling": "hot"}, InvalidValueError, "sampling must be a dict, such as .*, not 'hot'"),
        ({"sampling": {1: 2}}, InvalidValueError, "no sampling parameter 1"),
        (
            {"optional_outputs": {"top_logprobs": -1}},
            InvalidValueError,
            "top_logprobs must be greater than or equal to 0, not -1",
        ),
        ({"optional_outputs": {"routed_experts": 5}}, InvalidValueError, "routed_experts .*'flat'.*, not 5"),
        ({"optional_outputs": "all"}, InvalidValueError, "wanted must be a dict"),
        ({"stream": "no"}, InvalidValueError, "stream must be True or False, not 'no'"),
        ({"tokenizer": None}, TokenizerError, "tokenizer is None: give a model's name"),
        ({"tokenizer": 5}, TokenizerError, "tokenizer is of type int: give a model's name"),
        ({"tokenizer": tokenizer().backend_tokenizer}, TokenizerError, "AutoTokenizer.from_pretrained returns"),
        ({"template_arguments": "x"}, ValueError, "template_arguments must be a dict.*, not 'x'"),
        ({"template_arguments": {1: 2}}, ValueError, "template_arguments must be a dict"),
        (
            {"template_arguments": {"messages": []}},
            ValueError,
            "has messages, which each turn sets itself",
        ),
        *(
            (
                {"template_arguments": {name: value}},
                ValueError,
                f"template_arguments has {name}, which .*: leave it out",
            )
            for name, value in {
                "chat_template": "{{ 'X' }}",
                "tokenize": False,
                "max_length": 3,
                "add_generation_prompt": False,
                "continue_final_message": True,
            }.items()
        ),
        ({"parser": []}, InvalidValueError, r"parser must be the name of a tool-call format.*, not \[\]"),
        ({"tokenizer": "x" * 5000}, TokenizerError, "of 5000 characters is neither a folder nor a model's name"),
        ({"store": "/"}, InvalidValueError, "store='/' cannot be opened.*: give the path of a file"),
        ({"store": "/no/such/folder/x.tito"}, InvalidValueError, "in a folder that exists"),
        ({"store": 5}, InvalidValueError, "store must be a file's path.*, not 5"),
        (
            {"backend": None},
            InvalidValueError,
            r"backend must be a name \('sglang', 'vllm'\) or .*, not None",
        ),
        ({"backend": object()}, InvalidValueError, "not of type object"),
        ({"base_url": None}, InvalidValueError, "base_url must be an address or a list of them, not None"),
        ({"base_url": 5}, InvalidValueError, "base_url must be an address"),
        ({"timeout_s": "x"}, InvalidValueError, "timeout_s must be a number of seconds, not 'x'"),
        ({"connect_timeout_s": None}, InvalidValueError, "connect_timeout_s must be a number of seconds, not None"),
        ({"max_connections": "x"}, InvalidValueError, "max_connections must be a whole number, not 'x'"),
        ({"max_connections": -1}, InvalidValueError, "max_connections must be a whole number, at least 0, not -1"),
        ({"connect_timeout_s": 0}, InvalidValueError, "connect_timeout_s must be a positive number of seconds, not 0"),
        ({"connect_timeout_s": float("nan")}, InvalidValueError, "connect_timeout_s must be a positive number .* nan"),
        ({"timeout_s": 10**400}, InvalidValueError, "timeout_s must be a positive number of seconds, not 1000"),
        ({"turn_timeout_s": 10**400}, InvalidValueError, "turn_timeout_s must be a positive number .*, not 1000"),
        ({"turn_timeout_s": 10**5000}, InvalidValueError, "turn_timeout_s .* not a value of type int"),
        ({"max_attempts": "3"}, InvalidValueError, "max_attempts must be a whole number, not '3'"),
        ({"api_key": 5}, InvalidValueError, "api_key must be a string, or None, not a value of another type"),
        ({"model_id": 5}, InvalidValueError, "model must be a name on the server"),
        ({"temperature": 0}, InvalidValueError, r"temperature is a sampling parameter: give it as sampling=\{'temper"),
        ({"temprature": 3}, InvalidValueError, r"did you mean the sampling parameter in sampling=\{'temperature'"),
        ({"histry": "fork"}, InvalidValueError, "no argument of TITOModel named 'histry'; did you mean 'history'"),
        ({"bse_url": "x"}, InvalidValueError, "no argument of TITOModel named 'bse_url'; did you mean 'base_url'"),
        ({"timeout": 5}, InvalidValueError, "no argument of TITOModel named 'timeout'; did you mean 'timeout_s'"),
        (
            {"base_url": ["http://127.0.0.1:9"], "foo": 1},
            InvalidValueError,
            "no argument of .* named 'foo'",
        ),
    ],
)
def test_bad_input_is_one_sentence(changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        build(**changes)
    assert "\n" not in str(caught.value)


class Unshowable:
    """A value whose own `__repr__` fails."""

    def __repr__(self) -> str:
        raise KeyError("no words")


def nested(levels: int) -> Any:
    found: Any = []
    for _ in range(levels):
        found = [found]
    return found


HOSTILE = {"unshowable": Unshowable(), "nested": nested(100_000), "digits": 10**5000}
OPTIONS = [
    *("backend", "base_url", "tokenizer", "model_id", "sampling", "parser", "template_arguments", "content_tokens"),
    "tool_calls",
    *("context_window_limit", "history", "malformed_calls", "thinking", "on_abort", "max_resumes"),
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
    *("connect_timeout_s", "max_connections", "max_attempts", "unheard_of"),
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
    """Put a value where a place says "hostile"."""
    if isinstance(place, dict):
        return {key: put(item, value) for key, item in place.items()}
    if isinstance(place, list):
        return [put(item, value) for item in place]
    return value if place == "hostile" else place


WHOLE = ("context_window_limit", "max_resumes", "max_total_tokens", "max_connections", "max_attempts", "max_new_tokens")
"""Options of which any large whole number is allowed."""
CASES = [
    pytest.param(place, value, id=f"{place}-{kind}")
    for place in (*({name: "hostile"} for name in OPTIONS), *INSIDE)
    for kind, value in HOSTILE.items()
    if not (kind == "digits" and any(name in str(place) for name in WHOLE))
]


@pytest.mark.parametrize(("place", "value"), CASES)
def test_a_value_that_cannot_be_shown_is_named_all_the_same(place: dict[str, Any], value: Any) -> None:
    with pytest.raises((ValueError, EngineConnectionError)) as caught:
        build(**put(place, value))
    assert type(caught.value) is not ValueError or next(iter(place)) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"temperature": 0}, r"temperature is a sampling parameter: give it as sampling=\{'temperature': ...\}"),
        ({"max_total_token": 5}, "did you mean 'max_total_tokens'"),
        ({"ledger": "x"}, "ledger must be a Ledger, or None for a new one, not of type str"),
    ],
)
def test_bad_choices_of_a_rollout_are_one_sentence(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        policy_of("vllm").model(**choices)


def test_a_model_is_made_of_a_policy() -> None:
    with pytest.raises(InvalidValueError, match=r"policy must be what Policy\.connect returns, not of type NoneType"):
        TITOModel.of(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": "hot"}, "temperature must be a valid number, not 'hot'"),
        ({"sampling": 5}, "sampling must be a dict"),
        ({"context_window_limit": "x"}, "context_window_limit must be a number of tokens"),
        ({"history": "error"}, "no sampling parameter 'history'"),
    ],
)
def test_a_bad_change_is_one_sentence_and_changes_nothing(changes: dict[str, Any], words: str) -> None:
    model = policy_of("vllm").model(sampling={"temperature": 0.5})
    before = model.get_config()
    with pytest.raises(ValueError, match=words) as caught:
        model.update_config(**changes)
    assert "\n" not in str(caught.value)
    assert model.get_config() == before


def test_one_stop_string_needs_no_list() -> None:
    model = policy_of("vllm").model(sampling={"stop": "END"})
    assert model.get_config()["sampling"]["stop"] == ("END",)
    model.update_config(stop="X")
    assert model.get_config()["sampling"]["stop"] == ("X",)


def test_a_tokenizer_that_nobody_has_is_said_soon_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(TokenizerError, match="hub cannot be reached"):
        build(tokenizer="nobody/has-this")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_wrong_model_name_lists_those_served(kind: str) -> None:
    with (
        ScriptedServer(engine_of(kind, Says(""))) as server,
        pytest.raises(BadRequestError, match=r"does not serve 'nope'; it serves 'scripted'"),
    ):
        build(backend=kind, base_url=server.base_url, model_id="nope")


@pytest.mark.parametrize(("kind", "other"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_the_wrong_kind_of_server_names_the_right_backend(kind: str, other: str) -> None:
    with (
        ScriptedServer(engine_of(kind, Says(""))) as server,
        pytest.raises(BadRequestError, match=f"use backend='{kind}'"),
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
    assert "strands-tito needs Python 3.11 to 3.13, and python3.9 is 3.9" in done.stderr
