"""A backend and its `EngineInfo` are checked at connect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from backend.test_raw_responses import Liar
from support.backends import PROMPT, request_of
from support.scripted import tokenizer
from tito_core import Policy
from tito_core.backend import Capabilities, EngineInfo, ProtocolViolationError
from tito_core.backend.generate import generate, score, tokenize
from tito_core.backend.images import ImageSupport
from tito_core.backend.registry import check_backend
from tito_core.backend.values import InvalidValueError

WRONG: dict[str, list[Any]] = {
    "backend": [None, 5, b"x", "\ud800"],
    "model": [None, 5, b"x", ["m"], "\ud800"],
    "max_model_len": [0, -1, True, 1.5, "4096"],
    "version": [5, ["m"], "\ud800"],
    "weight_version": [5, b"x", "\ud800"],
    "processed_logprobs": ["x", 1],
    "truncated_logprobs": ["x", 0],
    "vocab_size": [0, "9"],
    "endpoints": [None, "x", 5, ("a", 5), ("\ud800",)],
    "capabilities": [None, {}, {"top_logprobs": 5}],
    "unreported": [None, 5, "echoed", ["echoed"], {"output_ids"}, frozenset({"output_ids"}), frozenset({5})],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_each_field_is_checked(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"backend": "liar", "model": "m", "max_model_len": 100, "version": "1", name: value}
    with pytest.raises(ProtocolViolationError, match=name) as caught:
        EngineInfo(**fields)
    assert isinstance(caught.value.backend, str)
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_logprobs", "5"), ("top_logprobs", -1), ("routed_experts", "x"), ("lower_first", None), ("options", None)],
)
def test_each_capability_is_checked(name: str, value: Any) -> None:
    fields: dict[str, Any] = {name: value}
    with pytest.raises(ProtocolViolationError, match=rf"capabilities\.{name}="):
        EngineInfo("liar", "m", 100, "1", capabilities=Capabilities(**fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [("accepted", 1), ("accepted", None), ("most", -1), ("most", "5"), ("most", True), ("remedy", None)],
)
def test_each_part_of_image_support_is_checked(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"accepted": True, "most": 4, "remedy": "Start it with --so.", name: value}
    with pytest.raises(ProtocolViolationError, match=rf"images\.{name}="):
        EngineInfo("liar", "m", 100, "1", images=ImageSupport(**fields))


@pytest.mark.parametrize("most", [None, 0, 1, 10**6])
def test_a_server_may_take_any_number_of_images(most: int | None) -> None:
    assert EngineInfo("liar", "m", 100, "1", images=ImageSupport(True, most)).images.most == most


@pytest.mark.parametrize("info", [None, {}, "x", 5, EngineInfo, "\ud800"])
def test_a_result_that_is_not_an_engine_info_is_refused(info: Any) -> None:
    backend: Any = Liar(None, info=info)
    for work in (generate(backend, request_of()), score(backend, PROMPT), tokenize(backend, "text")):
        with pytest.raises(ProtocolViolationError, match="EngineInfo") as caught:
            asyncio.run(work)
        assert caught.value.backend == "liar"
        assert repr(info)[:8] in str(caught.value)


def test_a_policy_refuses_it_at_connect() -> None:
    backend: Any = Liar(None, info={})
    with pytest.raises(ProtocolViolationError, match="EngineInfo"):
        Policy.connect(backend=backend, tokenizer=tokenizer())


METHODS = ("connect", "generate", "score", "tokenize", "abort", "aclose")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("value", [None, 5, lambda *_: None])
def test_a_backend_has_all_methods_as_coroutine_functions(name: str, value: Any) -> None:
    backend: Any = Liar(None)
    check_backend(backend)
    setattr(backend, name, value)
    with pytest.raises(InvalidValueError, match=name):
        check_backend(backend)


def test_a_backend_is_an_instance_with_a_name() -> None:
    with pytest.raises(InvalidValueError, match="class"):
        check_backend(Liar)
    for name in (None, 5, "\ud800"):
        backend: Any = Liar(None)
        backend.name = name
        with pytest.raises(InvalidValueError, match="name"):
            check_backend(backend)
    for value in (None, 5, object()):
        with pytest.raises(InvalidValueError, match="backend must be"):
            check_backend(value)
