"""Every recorded error of a real server becomes a typed error with the server's message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.backends import KINDS, Kind, Received, answering, http_response, request_of
from tito_conformance.testing import WireResponse
from tito_core.backend import (
    AuthenticationError,
    BackendError,
    BadRequestError,
    ContextLengthError,
    DamagedAnswerError,
    EngineTimeoutError,
    ServerError,
    ThrottledError,
)
from tito_core.backend.generate import generate
from tito_core.backend.http.errors import error_from_status

WIRE = Path(__file__).parents[1] / "wire"
CONTEXT = {
    "bad_too_long_completions",
    "bad_too_long_generate",
    "bad_too_long_chat",
    "bad_exact_len_generate",
    "bad_max_tokens0_completions",  # never sent: a server derives such a limit from a full context
    "bad_max_tokens0_generate",
    "bad_max_tokens_neg_completions",
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
    expected = {"dup_rid_second": ServerError}.get(name, BY_STATUS[status])  # a gateway's own replay: tried again
    expected = ContextLengthError if name in CONTEXT else expected
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
        "4090 tokens.*Shorten the history",
    ),
    (401, "no", AuthenticationError, r"answered 401: no\. .*TITO_API_KEY"),
    (403, "", AuthenticationError, "answered 403: HTTP 403 without a message.*TITO_API_KEY.*connect again"),
    (404, {"error": "no  such\n model"}, BadRequestError, r"answered 404: no such model\. .*connect again"),
    (405, "", BadRequestError, "answered 405.*Check the model's name, the address"),
    (501, "no", BadRequestError, "answered 501: no.*Check the model's name, the address"),
    (413, "<html>too large</html>", BadRequestError, "413: <html>too large.*too large.*client_max_body_size"),
    (422, {"detail": [{"loc": ["body"], "msg": "field required"}]}, BadRequestError, "field required.*not retried"),
    (429, {"detail": "full."}, ThrottledError, r"answered 429: full\. .*lower the concurrency"),
    (499, "no", BadRequestError, "answered 499: no.*not retried"),
    (500, "Internal Server Error", ServerError, "Internal Server Error.*log"),
    (500, "the maximum model length is 5", ServerError, "answered 500: the maximum model length is 5.*log"),
    (502, "<html>bad gateway</html>", ServerError, "bad gateway.*gateway lost the server"),
    (503, {"message": "full"}, ThrottledError, r"answered 503: full\. .*lower the concurrency"),
    (504, {"error": {"message": None}}, EngineTimeoutError, "answered 504.*gateway's timeout.*stream=True"),
    (400, {"error": {}}, BadRequestError, "answered 400"),
    (400, "[1]", BadRequestError, r"\[1\]"),
    (400, '"text"', BadRequestError, "text"),
    (204, "", DamagedAnswerError, "Only a 200 is accepted"),
]


@pytest.mark.parametrize(("status", "body", "kind_of_error", "sentence"), MADE)
@pytest.mark.parametrize("kind", KINDS)
async def test_other_answers_are_typed_too(
    kind: Kind, status: int, body: Any, kind_of_error: type[BackendError], sentence: str
) -> None:
    with pytest.raises(BackendError, match=sentence) as caught:
        await generate(answering(kind, served(status, body)), request_of())
    assert type(caught.value) is kind_of_error


_CONTEXT = "This model's maximum context length is 32 tokens. "
TOO_LONG: list[tuple[str, str]] = [
    ("vllm 0.7", "The prompt (total length 40) is too long to fit into the model (context length 32). Make sure ..."),
    ("vllm 0.8", f"{_CONTEXT}However, you requested 40 tokens (30 in the messages, 10 in the completion). ..."),
    ("vllm 0.8, without a limit", f"{_CONTEXT}However, you requested 40 tokens in the messages, Please reduce ..."),
    ("vllm 0.10 to 0.15, without a limit", f"{_CONTEXT}However, your request has 40 input tokens. Please reduce ..."),
    (
        "vllm 0.10 to 0.15",
        "'max_tokens' or 'max_completion_tokens' is too large: 10. This model's maximum context length is 32 ...",
    ),
    (
        "vllm 0.16 to 0.17",
        "You passed 40 input tokens and requested 10 output tokens. However, the model's context length is only ...",
    ),
    (
        "vllm 0.16 to 0.17, by characters",
        "You passed 400 input characters and requested 1 output tokens. However, the model's context length is only...",
    ),
    (
        "vllm 0.18 to 0.31",
        f"{_CONTEXT}However, you requested 10 output tokens and your prompt contains ...",
    ),
    (
        "vllm 0.32 to 0.33",
        f"{_CONTEXT}However, your prompt contains 40 input tokens, which exceeds ...",
    ),
    ("vllm 0.32 to 0.33, by characters", f"{_CONTEXT}However, your prompt contains 400 characters (more than 320 ..."),
    ("vllm 0.8 to 0.12, a limit that it derives", "max_tokens must be at least 1, got -5."),
    (
        "vllm 0.14 to 0.33, the same",
        "max_tokens must be at least 1, got -5. (parameter=max_tokens, value=-5)",
    ),
    ("vllm 0.8 to 0.33, a full context", "max_tokens must be at least 1, got 0."),
    ("vllm 0.8 to 0.33", "The decoder prompt (length 40) is longer than the maximum model length of 32. Make sure ..."),
    (
        "vllm 0.12 to 0.33",
        "The decoder prompt (length 32) plus the number of requested output tokens (at least 1) is longer than the "
        "maximum model length of 32. Make sure ...",
    ),
    ("sglang 0.4.0 to 0.5.23", "The input (40 tokens) is longer than the model's context length (32 tokens)."),
    (
        "sglang 0.4.6 to 0.5.23",
        "Requested token count exceeds the model's maximum context length of 32 tokens. ...",
    ),
    ("sglang 0.4.6 to 0.5.23", "Input length (40 tokens) exceeds the maximum allowed length (26 tokens). Use a ..."),
    ("sglang 0.4.0", "Multimodal prompt is too long. Check server logs for details."),
    ("sglang 0.4.0 to 0.5.23", "Multimodal prompt is too long after expanding multimodal tokens. After ..."),
    ("sglang 0.5.10 to 0.5.23, disaggregated", "Request r exceeds the maximum number of tokens: 40 > 32"),
    ("sglang 0.5.23", "Request prompt exceeds the KV memory budget: input_len=40."),
]
"""How engines refuse a prompt that is too long: versions whose source was read, and its words up to "..."."""


@pytest.mark.parametrize(("versions", "words"), TOO_LONG)
def test_every_wording_of_a_full_context_is_one(versions: str, words: str) -> None:
    for body in ({"error": {"message": words}}, {"object": "error", "message": words}, {"error": words}):
        error = error_from_status(versions.split()[0], 400, json.dumps(body), {}, url="http://a", request_id="r")
        assert type(error) is ContextLengthError, versions


@pytest.mark.parametrize(
    "words",
    [
        "'max_tokens' (99) cannot be greater than the model's maximum context length (32).",  # no history is too long
        "max_tokens must be at least 1, got 0.5.",
        "n must be at least 1, got -5.",
        "min_tokens must be greater than or equal to 0, got -5.",
    ],
)
def test_other_limits_are_no_full_context(words: str) -> None:
    error = error_from_status(
        "vllm", 400, json.dumps({"error": {"message": words}}), {}, url="http://a", request_id="r"
    )
    assert type(error) is BadRequestError


@pytest.mark.parametrize("kind", KINDS)
async def test_a_redirect_is_a_fault_and_never_followed(kind: Kind) -> None:
    paths = []

    def handler(request: Received) -> WireResponse:
        paths.append(request.path)
        return http_response(307, headers={"location": "https://elsewhere/v1"})

    with pytest.raises(DamagedAnswerError, match=r"redirect .*https://elsewhere/v1.*own addr"):
        await answering(kind, handler).connect()
    assert paths == ["/v1/models"] * 4, "one may be of a gateway that starts up"


@pytest.mark.parametrize("word", ["no ", "ü", "漢", "😀"])
async def test_a_long_refusal_that_is_read_to_its_limit_is_whole(word: str) -> None:
    """A server may quote the request. Characters may take four bytes, and the limit counts bytes."""
    body = json.dumps({"message": word * 300_000}, ensure_ascii=False)
    backend = answering("sglang", served(400, body, {"content-type": "application/json"}))
    with pytest.raises(BadRequestError, match="this request is not retried"):
        await generate(backend, request_of())
