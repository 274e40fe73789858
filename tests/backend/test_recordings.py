"""Every recorded answer of a real server becomes a typed result, with its columns and images, or a typed error."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.backends import (
    BACKENDS,
    NO_ANSWER,
    Handler,
    Kind,
    Received,
    Waits,
    answering,
    http_response,
    in_process,
    naming,
    request_of,
)
from support.wire_recordings import expanded
from tito_conformance.testing import WireResponse
from tito_core.backend import (
    BackendError,
    BadRequestError,
    ContextLengthError,
    DamagedAnswerError,
    EngineConnectionError,
    OnChunk,
    OptionalOutputs,
    ProtocolViolationError,
    RawResponse,
    SamplingParams,
    TokenRequest,
    TokenResponse,
)
from tito_core.backend.generate import generate, score
from tito_core.backend.images import PromptImages
from tito_core.backend.optional_columns import ColumnValidation
from tito_core.backend.values import RawReader
from tito_core.ledger import Image
from tito_core.ledger.columns import check_logprobs
from tito_core.ledger.turn import VersionSpan
from tito_sglang import wire as sglang_wire
from tito_vllm import wire as vllm_wire

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


# Recorded optional outputs of real servers are read as columns.


WIRE = Path(__file__).parents[1] / "wire"


def recorded(folder: str, name: str) -> tuple[dict[str, Any], Any]:
    """Body and answer of a recorded exchange."""
    record = json.loads((WIRE / folder / f"{name}.json").read_text())
    request = record["request"]
    return request["json" if "json" in request else "body"], record.get("response_json", record.get("response"))


async def read(
    folder: str, name: str, optional_outputs: OptionalOutputs, *, older: bool = False, delta_start: int = 0
) -> TokenResponse:
    """Ask a server that gives one recorded answer, with the echo that most recordings did not ask for."""
    sent, answer = recorded(folder, name)
    ids = sent.get("input_ids") or sent.get("token_ids") or sent["prompt"]
    kind: Kind = "sglang" if "meta_info" in answer else "vllm" if "token_ids" in sent else "vllm-completions"
    (answer["choices"][0] if kind == "vllm-completions" else answer)["prompt_token_ids"] = ids
    if kind == "vllm-completions":  # asked for by us, and not when it was recorded
        table = answer["choices"][0]["logprobs"]
        table["tokens"] = [f"token_id:{token}" for token in answer["choices"][0]["token_ids"]]
    for entry in _entries(answer) if older else ():
        entry["token"] = f"token_id:{entry.pop('token_id')}"

    def handler(request: Received) -> WireResponse:
        if request.path == "/server_info":
            return http_response(404)
        if request.method == "GET":
            return http_response(200, json={"data": [{"id": "m"}], "version": "1"})
        return http_response(200, json=answer)

    params = sent.get("sampling_params", sent)
    limit = params.get("max_tokens") or params["max_new_tokens"]
    sampling = {name: params[name] for name in ("temperature", "top_k") if name in params}
    request = request_of(ids, max_new_tokens=limit, stop_token_ids=(), **sampling)
    backend = answering(kind, handler, refuses=404 if kind == "vllm-completions" else 400)
    return await generate(backend, replace(request, optional_outputs=optional_outputs, delta_start=delta_start))


def _entries(answer: Any) -> list[Any]:
    content = answer["choices"][0]["logprobs"]["content"]
    return [*content, *(entry for one in content for entry in one["top_logprobs"])]


def table(response: TokenResponse) -> list[list[tuple[int, float]]]:
    """The likeliest of each output token, as pairs."""
    ids, logprobs = (response.columns[name].values.tolist() for name in ("top_ids", "top_logprobs"))
    return [[(i, round(lp, 4)) for i, lp in zip(*row, strict=True)] for row in zip(ids, logprobs, strict=True)]


async def test_sglang_top_logprobs() -> None:
    response = await read("sglang-0.5.23", "gen_top_logprobs", OptionalOutputs(top_logprobs=3))
    assert table(response) == [
        [(57, -1.5069), (19556, -1.7052), (67, -2.7272)],
        [(5248, -0.1146), (6737, -3.2043), (744, -3.6044)],
    ]
    assert response.columns["top_ids"].start == 37


async def test_sglangs_prompt_logprobs_begin_after_the_token_without_one() -> None:
    optional_outputs = OptionalOutputs(top_logprobs=2, prompt_logprobs=True)
    response = await read("sglang-0.5.23", "gen_top_logprobs_input", optional_outputs, delta_start=35)
    column = response.columns["prompt_logprobs"]
    assert column.start == 35
    assert column.values.tolist() == np.float32([-1.1920922133867862e-06, -0.00025233422638848424]).tolist()
    assert response.cached_tokens == 34, "the cache was kept up to the token before"
    assert table(response) == [[(57, -1.5069), (19556, -1.7052)]]


async def test_sglang_grammar_returns_fewer_top_tokens() -> None:
    """A masked token has float32's lowest number there."""
    response = await read("sglang-0.5.23", "gen_top_logprobs_grammar", OptionalOutputs(top_logprobs=3))
    ids, logprobs = (response.columns[name].values for name in ("top_ids", "top_logprobs"))
    assert ids.tolist() == [[64, 370, -1], [151645, 65, -1]]
    assert np.isnan(logprobs[:, 2]).all()
    assert np.allclose(np.exp(logprobs[:, :2]).sum(1), 1, atol=1e-5)


def test_sglang_sampling_mask() -> None:
    sent, answer = recorded("sglang-0.5.23", "gen_sampling_mask_support")
    generation = msgspec.json.decode(msgspec.json.encode(answer), type=sglang_wire.Generation)
    request = replace(request_of(sent["input_ids"], top_k=4), optional_outputs=OptionalOutputs(sampling_mask=True))
    mask = sglang_wire.reported(generation, request, "r", None)["sampling_mask"]
    assert mask == [[57, 19556, 67, 26843], [28, 665, 17, 30]]
    ids, logprobs = np.int32(answer["output_ids"]), np.zeros(2, np.float32)
    column = ColumnValidation(RawReader("sglang", "r"), request, ids, logprobs).columns(
        RawResponse(finish="stop", output_ids=ids, logprobs=logprobs, sampling_mask=mask)
    )["sampling_mask"]
    assert (column.start, column.values.tolist()) == (37, mask)


async def test_sglangs_sampling_mask_of_a_greedy_token_is_itself() -> None:
    response = await read("sglang-0.5.23", "gen_sampling_mask_greedy", OptionalOutputs(sampling_mask=True))
    assert response.columns["sampling_mask"].values.tolist() == [[token] for token in response.output_ids.tolist()]


@pytest.mark.parametrize("name", ["moe_routed_experts", "moe_routed_experts_start"])
async def test_sglangs_routed_experts_whole_and_cropped(name: str) -> None:
    sent, answer = recorded("sglang-0.5.23", name)
    start = sent.get("routed_experts_start_len", 0)
    raw = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4").reshape(-1, 3, 2)
    response = await read("sglang-0.5.23", name, OptionalOutputs(routed_experts=(3, 2)), delta_start=4)
    column = response.columns["routed_experts"]
    assert (column.start, column.shape, column.dtype) == (3, (3, 3, 2), "|u1")
    assert column.values.tolist() == raw[3 - start :].tolist()
    with pytest.raises(ProtocolViolationError, match=r"Law 2: routed_experts have shape \(\d, \d+\), expected"):
        await read("sglang-0.5.23", name, OptionalOutputs(routed_experts=(7, 4)), delta_start=4)


def test_sglang_capabilities() -> None:
    _, answer = recorded("sglang-0.5.23-more", "info_server_info")
    found = sglang_wire.capabilities(msgspec.convert(answer, sglang_wire.ServerInfo), 151936)
    assert (found.routed_experts, found.sampling_mask, found.priority, found.lower_first) == (True, True, False, False)
    assert (found.top_logprobs, found.expert_shape) == (1024, False)
    unknown = sglang_wire.capabilities(None, None)
    assert (unknown.routed_experts, unknown.sampling_mask, unknown.priority) == (None, None, None)
    assert unknown.top_logprobs == 1000
    bare = sglang_wire.capabilities(sglang_wire.ServerInfo(schedule_low_priority_values_first=True), 7)
    assert (bare.lower_first, bare.sampling_mask, bare.top_logprobs) == (True, False, 7)


@pytest.mark.parametrize("older", [False, True], ids=["0.32", "0.31"])
async def test_vllm_top_and_prompt_logprobs_in_both_shapes(older: bool) -> None:
    optional_outputs = OptionalOutputs(top_logprobs=1, prompt_logprobs=True)
    response = await read("vllm-0.32.0", "generate_prompt_logprobs_2", optional_outputs, older=older, delta_start=2)
    assert table(response) == [[(81033, -6.1067)]], "the sampled token is listed first, and is not the likeliest"
    assert response.output_ids.tolist() == [92822]
    column = response.columns["prompt_logprobs"]
    assert column.start == 2
    assert column.values.tolist() == np.float32([-11.459646224975586, -17.06833839416504]).tolist()
    with pytest.raises(ProtocolViolationError, match=r"3 top_logprobs .*output token 0 has 2"):
        await read("vllm-0.32.0", "generate_prompt_logprobs_2", OptionalOutputs(top_logprobs=3), older=older)


async def test_vllms_openai_endpoint_lists_one_more() -> None:
    response = await read("vllm-0.32.0", "completions_ids_logprobs1_as_ids", OptionalOutputs(top_logprobs=1))
    assert table(response)[0] == [(81033, -6.1067)]
    assert (response.logprobs < response.columns["top_logprobs"].values[:, 0]).all()


async def test_vllm_processed_logprobs_mask_truncated_tokens() -> None:
    response = await read("vllm-0.32.0", "processed_topk_logprobs5", OptionalOutputs(top_logprobs=4))
    ((first, second, third, fourth),) = response.columns["top_ids"].values.tolist()
    assert (first, second, third, fourth) == (59232, 117743, -1, -1)
    logprobs = response.columns["top_logprobs"].values[0]
    assert np.exp(logprobs[:2]).sum() == pytest.approx(1, abs=1e-6)
    assert np.isnan(logprobs[2:]).all()


@pytest.mark.parametrize(
    "name", ["routed_experts_completions", "routed_experts_completions_pstart", "routed_experts_generate"]
)
async def test_vllm_routed_experts_have_a_shape(name: str) -> None:
    sent, answer = recorded("vllm-0.30.0", name)
    whole = np.load(io.BytesIO(base64.b64decode(answer["choices"][0]["routed_experts"])))
    start = sent.get("routed_experts_prompt_start", 0)
    response = await read("vllm-0.30.0", name, OptionalOutputs(routed_experts=True), delta_start=10 if start else 4)
    column = response.columns["routed_experts"]
    assert (column.start, column.shape[1:], column.dtype) == (9 if start else 3, (3, 2), "|u1")
    assert column.values.tolist() == whole[column.start - start :].tolist()
    assert column.start + column.rows == 14


def test_vllm_reports_its_limit_of_top_logprobs() -> None:
    _, answer = recorded("vllm-0.32.0", "generate_logprobs_all")
    limits = [(json.dumps(answer), True, 19), (json.dumps(answer), False, 20), ("no such thing", True, None)]
    for refusal, one_more, most in limits:
        assert vllm_wire.capabilities(refusal, one_more=one_more, grammar=None).top_logprobs == most


# Recorded exchanges with images: both servers' answers are read, and our requests are those that they answered so.


FOLDERS = {"vllm": "vllm-0.32.0-images", "sglang": "sglang-0.5.23-images"}
PAD = 151655
SERVER = {"model_type": "qwen2_5_vl", "mm_preprocess_cache_size_mb": 64, "limit_mm_data_per_request": {"image": 8}}


@dataclass
class Replayed:
    """A server that takes images and answers a generation as recorded.

    Attributes:
        sent: Bodies of the generations.
    """

    kind: Any
    name: str

    def __post_init__(self) -> None:
        raw = json.loads((ROOT / FOLDERS[self.kind] / f"{self.name}.json").read_text())
        self.body, self.response, self.sent = raw["request"]["body"], raw["response"], list[Any]()
        self.connecting = True
        options: dict[str, Any] = {"sleep": Waits(), "http_transport": in_process(Handler(self.answer))}
        self.backend = BACKENDS[self.kind]("http://scripted", patience_s=0, **options)

    def answer(self, request: Received) -> WireResponse:
        if request.method == "GET":
            model = {"id": "m", "max_model_len": 4096}
            info = {"data": [model], "version": "1", "has_image_understanding": True, "weight_version": "w"}
            return http_response(200, json={**info, **SERVER})
        body = json.loads(request.content)
        if len(body.get("content_parts", ())) == vllm_wire.IMAGES_PROBED:
            return http_response(400, json={"error": {"message": "At most 8 image(s) may be provided in one prompt."}})
        if not self.connecting:
            self.sent.append(body)
            if "body_text" in self.response:
                headers = {"content-type": "text/event-stream"}
                response = http_response(200, content=self.response["body_text"].encode(), headers=headers)
                return naming(request, response)
            return naming(request, http_response(self.response["status"], json=self.response["body"]))
        return http_response(400)

    @property
    def pictures(self) -> list[bytes]:
        urls = self.body.get("image_data") or [part["url"] for part in self.body.get("content_parts", ())]
        return [base64.b64decode(url.partition(",")[2]) for url in urls]

    def request(self, lengths: tuple[int, ...] = (), **fields: Any) -> TokenRequest:
        params = self.body["sampling_params"]
        limit = max(params.get("max_tokens", params.get("max_new_tokens")), 1)
        sampling = SamplingParams(max_new_tokens=limit, temperature=0.0, ignore_eos=True)
        ids = np.array(self.body.get("token_ids") or self.body["input_ids"], np.int32)
        sizes = [(int.from_bytes(data[16:20]), int.from_bytes(data[20:24])) for data in self.pictures]
        images = tuple(Image(data, "png", *size) for data, size in zip(self.pictures, sizes, strict=True))
        return TokenRequest(ids, sampling, "r", images=PromptImages(images, PAD, lengths), **fields)

    async def run(self, request: TokenRequest, on_chunk: Any = None) -> Any:
        info = await self.backend.connect()
        assert (info.images.accepted, info.images.most) == (True, 8)
        self.connecting = False
        return await generate(self.backend, request, on_chunk)


ANSWERED = {
    "turn1": ((), ((125, 8),), 155),
    "turn2_tool_result_image": ((8,), ((169, 9),), 187),
    "turn3_text_delta": ((8, 9), (), 206),
}


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("kind", FOLDERS)
async def test_a_conversation_of_three_turns(kind: str, name: str) -> None:
    """The same ids and images on both; each server's echo, spans and counts agree."""
    replayed = Replayed(kind, name)
    lengths, media, length = ANSWERED[name]
    response = await replayed.run(replayed.request(lengths))
    assert (response.media, response.prompt_length) == (media, length)
    [sent] = replayed.sent
    digests = [hashlib.sha256(data).hexdigest() for data in replayed.pictures]
    if kind == "vllm":
        known = replayed.body["content_parts"]
        assert sent["content_parts"] == [{**part, "uuid": digest} for part, digest in zip(known, digests, strict=True)]
        assert (sent["token_ids"], sent["return_token_ids"]) == (replayed.body["token_ids"], True)
    else:
        assert sent["image_data"] == replayed.body["image_data"]
        assert sent["mm_content_hashes"] == [f"sha256:{digest}" for digest in digests]
        assert (sent["input_ids"], sent["return_prompt_token_ids"]) == (replayed.body["input_ids"], True)
        assert "mm_hashes" not in sent


@pytest.mark.parametrize("kind", FOLDERS)
async def test_an_old_image_of_another_length_is_refused(kind: str) -> None:
    replayed = Replayed(kind, "turn2_tool_result_image")
    with pytest.raises(ProtocolViolationError, match="Law 4"):
        await replayed.run(replayed.request((9,)))


@pytest.mark.parametrize(("kind", "name"), [("vllm", "content_parts_stream"), ("sglang", "stream_one_image")])
async def test_a_stream_tells_the_same(kind: str, name: str) -> None:
    replayed, seen = Replayed(kind, name), list[int]()
    if kind == "vllm":  # recorded without `include_usage`
        usage = {"choices": [], "usage": {"prompt_tokens": 22, "completion_tokens": 3}}
        head, _, end = replayed.response["body_text"].partition("data: [DONE]")
        replayed.response["body_text"] = f"{head}data: {json.dumps(usage)}\n\ndata: [DONE]{end}"
    whole = await replayed.run(replayed.request(), lambda chunk: seen.extend(chunk.output_ids.tolist()))
    assert (whole.media, whole.prompt_length, whole.output_ids.tolist()) == (((4, 8),), 22, seen)


@pytest.mark.parametrize(("kind", "name"), [("vllm", "prompt_logprobs_over_images"), ("sglang", "score_over_images")])
async def test_scores_are_those_of_the_expanded_ids(kind: str, name: str) -> None:
    replayed = Replayed(kind, name)
    await replayed.backend.connect()
    replayed.connecting = False
    request = replayed.request((8, 9))
    assert request.images is not None
    images = replace(request.images, lengths=(8, 9))
    found = await score(replayed.backend, request.input_ids, images)
    assert np.isnan(found).tolist() == [at == 0 or 4 <= at < 12 or 14 <= at < 23 for at in range(33)]
    other = Replayed(*next(each for each in SCORED if each[0] != kind))
    await other.backend.connect()
    other.connecting = False
    again = await score(other.backend, request.input_ids, images)
    assert np.nanmax(np.abs(found - again)) < 1e-5, "both engines score the same tokens and images"


SCORED = [("vllm", "prompt_logprobs_over_images"), ("sglang", "score_over_images")]
REFUSED: list[tuple[str, str, type[BackendError]]] = [
    ("vllm", "content_parts_bad_image", BadRequestError),
    ("sglang", "bad_image", BadRequestError),
    ("vllm", "content_parts_over_limit", BadRequestError),
    ("vllm", "content_parts_too_few_images", BadRequestError),
    ("sglang", "too_many_images", BadRequestError),
    ("vllm", "content_parts_too_many_images", BadRequestError),
    ("vllm", "content_parts_expanded_ids", BadRequestError),
    ("sglang", "expanded_ids_one_image", BadRequestError),
    ("sglang", "content_hash_wrong_default_server", BadRequestError),
]


@pytest.mark.parametrize(("kind", "name", "error"), REFUSED)
async def test_what_a_server_refuses_or_would_misread(kind: str, name: str, error: type[BackendError]) -> None:
    replayed = Replayed(kind, name)
    with pytest.raises(error):
        await replayed.run(replayed.request())


@pytest.mark.parametrize("kind", FOLDERS)
async def test_a_prompt_too_long_after_expansion_overflows_the_context(kind: str) -> None:
    """Both answer 400; Strands' conversation manager may shorten the history."""
    messages = {
        "vllm": "The decoder prompt (length 4125) is longer than the maximum model length of 4096. Make sure that "
        "`max_model_len` is no smaller than the number of text tokens plus multimodal tokens.",
        "sglang": "The input (8265 tokens) is longer than the model's context length (8192 tokens).",
    }
    replayed = Replayed(kind, "turn1")
    replayed.response = {"status": 400, "body": {"error": {"message": messages[kind]}}}
    with pytest.raises(ContextLengthError):
        await replayed.run(replayed.request())
