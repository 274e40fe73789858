"""`Backend.tokenize`: the server's own ids, or None if the server cannot encode text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from support.backends import (
    KINDS,
    NO_ANSWER,
    Kind,
    Received,
    Waits,
    answering,
    engine_of,
    http_response,
    in_process_backend,
)
from tito_conformance.testing import WireResponse
from tito_core.backend import (
    DamagedAnswerError,
    EngineConnectionError,
    EngineTimeoutError,
    ServerError,
    ThrottledError,
)
from tito_core.backend.http.backend import HttpBackend

BOS = 1


def encode(text: str, special: bool) -> list[int]:
    return [BOS] * special + [10 + ord(letter) % 900 for letter in text]


def answers(kind: Kind, *responses: WireResponse) -> tuple[HttpBackend, list[Received], Waits]:
    """Return a backend whose server answers `/tokenize` with these responses in turn, and repeats the last."""
    left, requests, waits = list(responses), [], Waits()

    def answer(request: Received) -> WireResponse:
        if request.path != "/tokenize":
            models = {"data": [{"id": "m", "max_model_len": 100}]}
            return http_response(200, json=models) if request.path == "/v1/models" else http_response(404)
        requests.append(request)
        return left.pop(0) if len(left) > 1 else left[0]

    return answering(kind, answer, sleep=waits), requests, waits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["", "Hello", "Größe 🙂\n"])
async def test_the_servers_ids_come_without_a_bos(kind: Kind, text: str) -> None:
    engine = engine_of(kind, encode=encode, model="mine")
    ids = await in_process_backend(engine).tokenize(text)
    assert ids is not None
    assert ids.dtype == np.int32
    assert ids.tolist() == encode(text, special=False)
    sent = json.loads(engine.exchanges[-1].body)
    assert sent == {"model": "mine", "prompt": text, "add_special_tokens": False}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_without_the_endpoint_or_a_tokenizer_gives_none(kind: Kind) -> None:
    assert await in_process_backend(engine_of(kind)).tokenize("x") is None
    bare = engine_of(kind, encode=encode, skip_tokenizer_init=True)
    waits = Waits()
    assert await in_process_backend(bare, sleep=waits).tokenize("x") is None
    assert waits.seconds == [], "it is not asked again"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "response",
    [
        *(http_response(status, json={"error": "no"}) for status in (400, 401, 403, 404, 405, 422, 501)),
        http_response(500, json={"message": "Internal server error during tokenization: no tokenizer"}),
    ],
    ids=lambda response: f"{response.status} {response.content.decode()[:20]}",
)
async def test_any_refusal_is_none_and_not_retried(kind: Kind, response: WireResponse) -> None:
    backend, requests, _ = answers(kind, response)
    assert await backend.tokenize("x") is None
    assert len(requests) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "passing",
    [
        *map(http_response, (503, 502, 500, 302)),
        *(http_response(status, json={"path": "/tokenize"}) for status in (500, 502, 520)),
        http_response(502, text="no tokenizer"),
        NO_ANSWER,
        http_response(200, text="<html>", headers={"content-type": "text/html"}),
        http_response(200, json={"ids": [1]}),
        http_response(200, json={"tokens": [[1, 2]]}),
        http_response(200, json={"tokens": [-1]}),
        http_response(200, json={"tokens": [2**31]}),
    ],
    ids=lambda response: f"{response.status} {response.content.decode()[:20]}",
)
async def test_a_transient_failure_of_tokenize_is_retried(kind: Kind, passing: Any) -> None:
    backend, requests, waits = answers(kind, passing, http_response(200, json={"tokens": [7]}))
    ids = await backend.tokenize("x")
    assert ids is not None
    assert ids.tolist() == [7]
    assert len(requests) == 2
    assert len(waits.seconds) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("response", "error"),
    [
        (http_response(503), ThrottledError),
        (http_response(504), EngineTimeoutError),
        (NO_ANSWER, EngineConnectionError),
        (http_response(500), ServerError),
        (http_response(200, json={"ids": [1]}), DamagedAnswerError),
    ],
)
async def test_an_unreachable_server_is_an_error(kind: Kind, response: Any, error: type) -> None:
    backend, _, _ = answers(kind, response)
    with pytest.raises(error):
        await backend.tokenize("x")
