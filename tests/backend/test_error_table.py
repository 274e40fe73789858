"""Every recorded error of a real server becomes a typed error with the server's message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strands_tito.testing import WireResponse
from support.backends import KINDS, Kind, Received, answering, http_response, request_of
from tito_core.backend import (
    AuthenticationError,
    BackendError,
    BadRequestError,
    ContextLengthError,
    ProtocolViolationError,
    ServerError,
    ThrottledError,
)
from tito_core.backend.calls import generate

WIRE = Path(__file__).parents[1] / "wire"
CONTEXT = {
    "bad_too_long_completions",
    "bad_too_long_generate",
    "bad_too_long_chat",
    "bad_exact_len_generate",
    "err_too_long",
    "err_total_over_ctx",
}
BY_STATUS: dict[int, type[BackendError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    404: BadRequestError,
    405: BadRequestError,
    500: ServerError,
    503: ThrottledError,
}


def recorded() -> list[Any]:
    found = []
    for path in sorted(WIRE.glob("*/*.json")):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and record.get("status") not in (None, 200, -1):
            body = record.get("response", record.get("response_json", record.get("response_text")))
            kind = path.parent.name.split("-")[0]
            found.append(pytest.param(kind, path.stem, record["status"], body, id=f"{kind}-{path.stem}"))
    return found


def served(status: int, body: Any, headers: dict[str, str] | None = None) -> Any:
    """A server that tells what it is and answers everything else with one response."""

    def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            return http_response(200, json={"data": [{"id": "m", "max_model_len": 100}], "version": "1"})
        content = body if isinstance(body, str) else json.dumps(body)
        return http_response(status, text=content, headers=headers)

    return handler


def words_of(body: Any) -> str:
    """The message, found in another way than ours: the longest text in the body."""
    if isinstance(body, str):
        return body.strip()
    texts = [text for value in body.values() for text in ([words_of(value)] if isinstance(value, dict | str) else [])]
    return max(texts, key=len, default="")


def test_there_are_recordings_of_every_kind() -> None:
    statuses = {(param.values[0], param.values[2]) for param in recorded()}
    assert {(kind, status) for kind in KINDS for status in (400, 401, 404, 405)} <= statuses
    assert {("vllm", 500), ("sglang", 503)} <= statuses


@pytest.mark.parametrize(("kind", "name", "status", "body"), recorded())
async def test_a_recorded_error_is_typed_and_keeps_the_server_message(
    kind: Kind, name: str, status: int, body: Any
) -> None:
    expected = ContextLengthError if name in CONTEXT else BY_STATUS[status]
    with pytest.raises(BackendError) as caught:
        await generate(answering(kind, served(status, body)), request_of())
    error = caught.value
    assert type(error) is expected
    assert " ".join(words_of(body).split())[:150].rstrip(".") in str(error)
    assert "\n" not in str(error)
    assert (error.backend, error.status, error.request_id) == (kind, status, "r")
    assert error.body == (body if isinstance(body, str) else json.dumps(body))[:2000]
    assert "http://scripted/" in str(error)


MADE: list[tuple[int, Any, type[BackendError], str]] = [
    (400, {"error": {"message": "temperature must not exceed 2.0, got 3.0."}}, BadRequestError, "must not exceed 2.0"),
    (400, {"error": {"message": "top_k must not exceed the maximum of 100."}}, BadRequestError, "maximum of 100"),
    (400, {"error": "max_new_tokens is longer than allowed"}, BadRequestError, "longer than allowed"),
    (
        400,
        {
            "error": {
                "message": "Input length (4090 tokens) exceeds the maximum allowed length (4089 tokens). "
                "Use a shorter input or enable --allow-auto-truncate."
            }
        },
        ContextLengthError,
        "4090 tokens",
    ),
    (403, "", AuthenticationError, "answered 403: HTTP 403 without a message"),
    (413, "<html>too large</html>", BadRequestError, "too large"),
    (422, {"detail": [{"loc": ["body"], "msg": "field required"}]}, BadRequestError, "field required"),
    (429, "", ThrottledError, "lower the concurrency"),
    (500, "Internal Server Error", ServerError, "Internal Server Error"),
    (502, "<html>bad gateway</html>", ServerError, "bad gateway"),
    (503, "no upstream", ThrottledError, "no upstream"),
    (504, {"error": {"message": None}}, ServerError, "answered 504"),
    (400, {"error": {}}, BadRequestError, "answered 400"),
    (400, "[1]", BadRequestError, r"\[1\]"),
    (400, '"text"', BadRequestError, "text"),
    (204, "", ProtocolViolationError, "Only a 200 is accepted"),
]


@pytest.mark.parametrize(("status", "body", "kind_of_error", "sentence"), MADE)
@pytest.mark.parametrize("kind", KINDS)
async def test_other_answers_are_typed_too(
    kind: Kind, status: int, body: Any, kind_of_error: type[BackendError], sentence: str
) -> None:
    with pytest.raises(BackendError, match=sentence) as caught:
        await generate(answering(kind, served(status, body)), request_of())
    assert type(caught.value) is kind_of_error


@pytest.mark.parametrize("kind", KINDS)
async def test_a_redirect_is_an_error_and_not_retried(kind: Kind) -> None:
    paths = []

    def handler(request: Received) -> WireResponse:
        paths.append(request.path)
        return http_response(307, headers={"location": "https://elsewhere/v1"})

    with pytest.raises(ProtocolViolationError, match=r"redirect .*https://elsewhere/v1.*own addr"):
        await answering(kind, handler).connect()
    assert paths == ["/v1/models"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_very_long_message_is_shortened(kind: Kind) -> None:
    with pytest.raises(BadRequestError) as caught:
        await generate(answering(kind, served(400, {"error": {"message": "x" * 100_000}})), request_of())
    assert len(str(caught.value)) < 2000
    assert len(caught.value.body) == 2000
