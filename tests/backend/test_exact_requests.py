"""The exact requests that a server gets: probes at connect, a grammar, and the session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from support.backends import BACKENDS, WIRES, Handler, Kind, Received, Waits, http_response, over_socket, request_of
from tito_conformance.testing import WireResponse
from tito_core.backend import AuthenticationError, BadRequestError, Grammar
from tito_core.backend.generate import generate

OPEN: tuple[Any, ...] = (
    "/inference/v1/generate",
    {"token_ids": [], "sampling_params": {"max_tokens": 1}, "model": "m", "reasoning_ended": "unknown"},
)
MANY = {"logprobs": 2**31 - 1, "max_tokens": 1}
ONE_TEXT = {"max_tokens": 16, "temperature": 0.0, "structured_outputs": {"regex": "qzxqzxqzx"}}
OF_GRAMMARS = [
    ("/v1/completions", {"model": "m", "prompt": [0], "max_tokens": 1, "thinking_token_budget": 0}),
    ("/v1/completions", {"model": "m", "prompt": [0], **ONE_TEXT}),
]
"""Asked of a server that does not read `reasoning_ended`: whether it has a reasoning parser."""
SGLANG_PROBE = {
    "input_ids": [0],
    "sampling_params": {"max_new_tokens": 1, "logit_bias": {"2147483647": 0.0}},
    **{"return_prompt_token_ids": True, "return_logprob": True, "logprob_start_len": 0},
}
PARTS = [{"type": "image_url", "uuid": "probe"}] * 1000
CONNECTING: dict[Kind, list[Any]] = {
    "vllm": [
        OPEN,
        *OF_GRAMMARS,
        ("/inference/v1/generate", {"model": "m", "token_ids": [0], "sampling_params": MANY}),
        ("/inference/v1/generate", {"model": "m", "token_ids": [0], "sampling_params": MANY, "content_parts": PARTS}),
    ],
    "vllm-completions": [OPEN, *OF_GRAMMARS, ("/v1/completions", {"model": "m", "prompt": [0], **MANY})],
    "sglang": [("/generate", SGLANG_PROBE)],
}


class Server:
    """Records its requests, and refuses all but those for its own properties."""

    def __init__(self, kind: Kind, statuses: tuple[int, ...] = (400,)) -> None:
        self.closed = kind == "vllm-completions"
        self.statuses = statuses
        self.posts: list[tuple[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.gets: list[str] = []
        options: Any = {"sleep": Waits(), "http_transport": over_socket(Handler(self.answer))}
        self.backend = BACKENDS[kind]("http://h", **options)

    def answer(self, request: Received) -> WireResponse:
        path = request.path
        if request.method == "GET":
            self.gets.append(path)
            documents = {
                "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]},
                "/server_info": {"enable_priority_scheduling": True, "sampling_mask_max_tokens": 9},
                "/model_info": {"weight_version": "w"},
                "/version": {"version": "1"},
            }.get(path)
            return http_response(404) if documents is None else http_response(200, json=documents)
        self.posts.append((path, json.loads(request.content)))
        self.headers.append(request.headers)
        if path == "/inference/v1/generate" and self.closed:
            return http_response(self.statuses[0])
        message = "logprobs, which is greater than max allowed: 20. Vocabulary: must be less than 500"
        return http_response(400, json={"error": {"message": message}})


@pytest.mark.parametrize("kind", WIRES)
async def test_requests_at_connect(kind: Kind) -> None:
    server = Server(kind, (404,))
    info = await server.backend.connect()
    assert sorted(server.posts, key=str) == sorted(CONNECTING[kind], key=str), "some are sent at the same time"
    can = info.capabilities
    if kind == "sglang":
        assert "/server_info" in server.gets
        assert (can.priority, can.sampling_mask, can.expert_shape) == (True, True, False)
        assert (info.weight_version, info.max_model_len) == ("w", 58), "a real server refuses longer prompts"
    else:
        assert can.top_logprobs == (19 if kind == "vllm" else 20), "the sampled token counts on one of them"
        assert ("/inference/v1/generate" in info.endpoints) is (kind == "vllm")
        assert can.grammar_from_first_token is None, "it refused both probes"


@pytest.mark.parametrize("takes", ["nothing", "a budget", "free text", "the only text"])
async def test_what_shows_whether_grammars_apply_from_the_first_token(takes: str) -> None:
    server = Server("vllm-completions", (404,))
    answers = {"free text": "hello", "the only text": "qzxqzxqzx"}

    def answer(request: Received) -> WireResponse:
        body = json.loads(request.content or b"{}")
        if takes == "a budget" and "thinking_token_budget" in body:
            return http_response(200, json={"choices": []})
        if takes in answers and "structured_outputs" in body:
            return http_response(200, json={"choices": [{"text": answers[takes]}]})
        return server.answer(request)

    backend = BACKENDS["vllm-completions"]("http://h", sleep=Waits(), http_transport=over_socket(Handler(answer)))
    expected = {"a budget": False, "free text": False, "the only text": True}
    assert (await backend.connect()).capabilities.grammar_from_first_token is expected.get(takes)


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_a_closed_endpoint_is_not_used(status: int) -> None:
    info = await Server("vllm-completions", (status,)).backend.connect()
    assert info.endpoints == ("/v1/completions",)


async def test_a_wrong_key_is_not_taken_for_a_closed_endpoint() -> None:
    with pytest.raises(AuthenticationError):
        await Server("vllm-completions", (401,)).backend.connect()


GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""Kinds of a grammar, and what vLLM calls them."""


@pytest.mark.parametrize("session", [None, "mine"])
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("kind", WIRES)
async def test_a_grammar_and_a_session_are_sent(kind: Kind, grammar: str, session: str | None) -> None:
    server = Server(kind, (404,))
    value = '{"type":"object"}' if grammar == "json_schema" else "a+"
    request = request_of(grammar=Grammar.model_validate({"kind": grammar, "value": value}))
    with pytest.raises(BadRequestError):
        await generate(server.backend, replace(request, session_id=session))
    path, body = server.posts[-1]
    headers = server.headers[-1]
    if kind == "sglang":
        assert body["sampling_params"][grammar] == value
        assert (path, body["rid"]) == ("/generate", "r")
    else:
        given = body["sampling_params"] if kind == "vllm" else body
        assert given["structured_outputs"] == {GRAMMARS[grammar]: value}
        assert headers["x-request-id"] == "r"
    name = "x-smg-routing-key" if kind == "sglang" else "x-session-id"
    assert headers.get(name) == session
