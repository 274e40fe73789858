"""Recorded exchanges with images: both servers' answers are read, and our requests are those that they answered so."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.backends import BACKENDS, Handler, Received, Waits, http_response, in_process, naming
from tito_conformance.testing import WireResponse
from tito_core.backend import BackendError, BadRequestError, ContextLengthError, ProtocolViolationError, SamplingParams
from tito_core.backend.generate import generate, score
from tito_core.backend.images import PromptImages
from tito_core.backend.protocol import TokenRequest
from tito_core.ledger import Image
from tito_vllm import wire as vllm_wire

ROOT = Path(__file__).parents[1] / "wire"
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
