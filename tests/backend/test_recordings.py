"""Every recorded answer of a real server becomes a typed result or an expected typed error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.backends import NO_ANSWER, Received, answering, http_response
from support.wire_recordings import expanded
from tito_conformance.testing import WireResponse
from tito_core.backend import (
    BackendError,
    DamagedAnswerError,
    EngineConnectionError,
    OnChunk,
    ProtocolViolationError,
    SamplingParams,
    TokenRequest,
    TokenResponse,
)
from tito_core.backend.generate import generate
from tito_core.ledger.columns import check_logprobs
from tito_core.ledger.turn import VersionSpan

ROOT = Path(__file__).parents[1] / "wire"
NO_EXCHANGE = {"rescore_dense", "rescore_moe"}
"""Recordings of measurements, not of requests."""
PROMPT = [785, 3974, 13876, 38835]


class Recorded:
    """One recording, read for this test alone."""

    def __init__(self, path: Path) -> None:
        raw = json.loads(path.read_text())
        self.kind = path.parent.name.split("-")[0]
        self.name = path.stem
        request = raw.get("request") or {}
        body = request.get("body", request.get("json"))
        self.path = str(
            request.get("path", "/v1/completions" if "completions" in path.stem else "/inference/v1/generate")
        )
        self.body: dict[str, Any] = expanded(body) if isinstance(body, dict) else {}
        self.status = raw.get("status", 200)
        self.answer: Any = raw
        for key in ("response", "response_json", "response_text"):
            if raw.get(key) is not None:
                self.answer = raw[key]
                break
        else:
            self.answer = "" if "request" in raw else raw

    @property
    def content_type(self) -> str:
        streamed = isinstance(self.answer, dict) and "_sse" in self.answer
        streamed = streamed or (isinstance(self.answer, str) and self.answer.startswith("data: "))
        return "text/event-stream" if streamed else "application/json"

    @property
    def content(self) -> bytes:
        if isinstance(self.answer, dict) and "_sse" in self.answer:
            events = (event if event == "[DONE]" else json.dumps(event) for event in self.answer["_sse"])
            return b"".join(b"data: " + event.encode() + b"\n\n" for event in events)
        return self.answer.encode() if isinstance(self.answer, str) else json.dumps(expanded(self.answer)).encode()

    @property
    def ids(self) -> list[int]:
        for key in ("input_ids", "token_ids", "prompt"):
            found = self.body.get(key)
            if isinstance(found, list) and found and all(type(token) is int and token >= 0 for token in found):
                return found
        return PROMPT

    @property
    def sampled(self) -> tuple[list[int], list[float], str] | None:
        """Output ids, their logprobs and why it ended, where the answer is one generation that has all three."""
        answer = expanded(self.answer)
        if not isinstance(answer, dict):
            return None
        if self.kind == "sglang":
            entries = answer.get("meta_info", {}).get("output_token_logprobs")
            if entries is None or len(entries) != len(answer["output_ids"]):
                return None
            reason = answer["meta_info"]["finish_reason"]["type"]
            return [entry[1] for entry in entries], [entry[0] for entry in entries], reason
        choices = answer.get("choices") or []
        logprobs = (choices[0].get("logprobs") or {}) if len(choices) == 1 else {}
        ids = choices[0].get("token_ids") if len(choices) == 1 else None
        values = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or []]
        return None if not ids or len(ids) != len(values) else (ids, values, choices[0]["finish_reason"])

    def request(self) -> TokenRequest:
        """The request that could have had this answer."""
        params = self.body.get("sampling_params")
        params = params if isinstance(params, dict) else self.body
        sampled = self.sampled
        count = 1 if sampled is None else max(1, len(sampled[0]))
        given = params.get("max_new_tokens", params.get("max_tokens"))
        limit = given if type(given) is int and given >= count else count
        extra = {"extra": {"stop_regex": params["stop_regex"]}} if "stop_regex" in params else {}
        sampling = SamplingParams(
            max_new_tokens=limit, ignore_eos=bool(params.get("ignore_eos")), stop=params.get("stop") or (), **extra
        )
        return replace(TokenRequest(np.array(self.ids, np.int32), sampling, "r"), echo=False)

    async def outcome(self, on_chunk: OnChunk | None = None) -> TokenResponse | BackendError:
        """Pass it to a backend as the answer to a generation, streamed if there is a watcher."""

        def handler(request: Received) -> WireResponse:
            if request.method == "GET":
                known = {"data": [{"id": "m", "max_model_len": 10**6}], "version": "0.32.0"}
                return http_response(200, json=known)
            if self.status == -1:
                return NO_ANSWER
            return http_response(self.status, content=self.content, headers={"content-type": self.content_type})

        completions = self.kind == "vllm" and self.path == "/v1/completions"
        refuses = 404 if completions else 400
        backend = answering(self.kind, handler, refuses=refuses, patience_s=0)
        try:
            return await generate(backend, self.request(), on_chunk)
        except BackendError as error:
            return error


RECORDINGS = [Recorded(path) for path in sorted(ROOT.glob("*/*.json")) if path.stem not in NO_EXCHANGE]
GENERATES = ("/generate", "/inference/v1/generate", "/v1/completions")


@pytest.mark.parametrize("recorded", RECORDINGS, ids=lambda recorded: f"{recorded.kind}-{recorded.name}")
async def test_a_recording_is_a_typed_result_or_a_typed_error(recorded: Recorded) -> None:
    outcome = await recorded.outcome()
    sampled = recorded.sampled
    if recorded.status == -1:
        assert type(outcome) is EngineConnectionError
        assert outcome.sent
    elif recorded.status != 200:
        assert isinstance(outcome, BackendError)
        assert outcome.status == recorded.status
    elif recorded.content_type != "application/json":
        assert type(outcome) is DamagedAnswerError
        assert "JSON is malformed" in str(outcome)
    elif recorded.path not in GENERATES or sampled is None:
        assert isinstance(outcome, ProtocolViolationError), "no generation, or less than that"
    elif isinstance(outcome, TokenResponse):
        assert outcome.output_ids.tolist() == sampled[0]
        assert outcome.logprobs.tolist() == np.array(sampled[1], np.float32).tolist()
        assert (outcome.finish_word or outcome.finish) == sampled[2]
        assert outcome.finish == {"repetition": "length"}.get(sampled[2], sampled[2])
        if recorded.kind == "sglang":
            about = expanded(recorded.answer)["meta_info"]
            assert outcome.cached_tokens == about.get("cached_tokens")
            assert outcome.versions == tuple(
                VersionSpan(span["start"], span["end"], span["version"]) for span in about["weight_versions"]
            )
            assert (outcome.stop, outcome.message) == tuple(map(about["finish_reason"].get, ("matched", "message")))
    else:
        assert UNLIKE[recorded.name] in str(outcome)
        assert type(outcome) is ProtocolViolationError


TEXT = (
    "has the logprob of"  # logprobs by the token's text: no `return_tokens_as_token_ids` was sent, or text was wanted
)
UNLIKE: dict[str, str] = {
    **dict.fromkeys(
        (
            *("completions_ids_logprobs0", "genconfig_completions", "generate_text_mode", "stop_eos_completions"),
            *("stop_eos_completions_skipspecial_false", "stop_eos_generate_text", "stop_string_completions"),
            *("stop_string_completions_include", "stop_string_generate", "structured_regex_completions"),
            *("structured_regex_text_generate", "v0.30_routed_experts_completions"),
            *("v0.30_routed_experts_completions_pstart", "aborted_completions_response"),
            *("routed_experts_completions", "routed_experts_completions_pstart"),
        ),
        TEXT,
    ),
    **dict.fromkeys(("gen_score_only_max0", "gen_given_ids"), "no output ids"),  # scoring, which samples nothing
    "session_turn2": "reported prompt_tokens=11",  # a session of SGLang's own, whose prompts the server puts together
    "structured_grammar_generate": "reported stop token 151643",  # its ids were cut when they were recorded
}
"""Generations that answer a request which no backend of ours sends, and the error of each."""


def test_most_recorded_generations_are_results() -> None:
    names = {recorded.name for recorded in RECORDINGS}
    assert set(UNLIKE) <= names, "every exception is still needed"
    whole = [r for r in RECORDINGS if r.path in GENERATES and r.sampled is not None and r.content_type.endswith("json")]
    assert len(whole) > 60
    assert {recorded.kind for recorded in RECORDINGS} == {"vllm", "sglang"}


@pytest.mark.parametrize("name", sorted(NO_EXCHANGE))
def test_measured_logprobs_are_log_probabilities_and_rescored_alike(name: str) -> None:
    found = expanded(json.loads((ROOT / "vllm-0.32.0-more" / f"{name}.json").read_text()))
    assert len(found["tokens"]) == len(found["logprobs"])
    check_logprobs(found["logprobs"])
    if "rescore" in found:
        rescored = found["rescore"][len(found["prompt"]) :]
        assert max(abs(a - b) for a, b in zip(found["logprobs"], rescored, strict=True)) < 1e-4


STREAMS = [one for one in RECORDINGS if one.content_type == "text/event-stream" and one.path in GENERATES]
UNLIKE_STREAMS = {
    **dict.fromkeys(("gen_stream_skip", "abort_stream_victim"), "no logprobs"),
    "err_stream_bad": "answered 400: temperature must be a non-negative finite number",
    **dict.fromkeys(  # no usage was asked for
        ("v0.30_routed_experts_completions_stream", "v0.30_routed_experts_generate_stream"), "prompt_tokens=None"
    ),
}
"""Streams that answer a request which no backend of ours sends, and the error of each."""


@pytest.mark.parametrize("recorded", STREAMS, ids=lambda recorded: f"{recorded.kind}-{recorded.name}")
async def test_a_recorded_stream_is_a_typed_result_or_a_typed_error(recorded: Recorded) -> None:
    shown: list[int] = []
    outcome = await recorded.outcome(lambda chunk: shown.extend(chunk.output_ids.tolist()))
    if isinstance(outcome, TokenResponse):
        assert outcome.output_ids.tolist() == shown
        assert len(shown) > 1
    else:
        assert UNLIKE_STREAMS[recorded.name] in str(outcome)
