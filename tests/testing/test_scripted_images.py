"""Scripted servers read images as the recorded servers did, and their logprobs depend on each picture's bytes."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.image_recordings import PAD, engine_of, load_images
from support.pictures import gif, jpeg_header, webp_header
from support.wire_recordings import Recording
from testing.test_scripted_recordings import decoded, differences
from tito_conformance.testing import HashPolicy, ImageSettings, Replay, ScriptedEngine, scripted_engine
from tito_conformance.testing.pictures import BadImage, picture, pixels, place, png, same_pixels, size

pytestmark = pytest.mark.suite

RECORDINGS = [recording for kind in ("vllm", "sglang") for recording in load_images(kind)]
KINDS = ("vllm", "sglang")
IDS = [5, 6, PAD, 7, 8, 9, 10, 11]
SETTINGS = ImageSettings(PAD)


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda r: f"{r.kind}-{r.name}")
async def test_answers_as_recorded(recording: Recording) -> None:
    engine = engine_of(recording)
    response = await engine.handle(recording.method, recording.path, recording.headers, recording.sent)
    if recording.status == -1:
        assert response.dropped
        assert engine.state.dead
        return
    assert response.status == recording.status
    assert list(differences(recording.response, decoded(response.content), set())) == []


def sent(kind: str, ids: list[int], pictures: list[bytes], **sampling: Any) -> tuple[str, bytes]:
    """Return path and body of a request, with logprobs of the prompt if `scored`."""
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in pictures]
    scored = sampling.pop("scored", False)
    count = sampling.pop("count", 12)
    if kind == "vllm":
        params = {"max_tokens": count or 1, "logprobs": 0, **sampling, **({"prompt_logprobs": 0} if scored else {})}
        parts = [{"type": "image_url", "url": url} for url in urls]
        body = {"token_ids": ids, "sampling_params": params, "return_token_ids": True, "content_parts": parts}
        return "/inference/v1/generate", json.dumps(body).encode()
    options = {"return_logprob": True, "return_prompt_token_ids": True, "logprob_start_len": 0 if scored else -1}
    params = {"max_new_tokens": count, **sampling}
    return "/generate", json.dumps(
        {"input_ids": ids, "sampling_params": params, "image_data": urls, **options}
    ).encode()


async def ask(engine: ScriptedEngine, ids: list[int], pictures: list[bytes], **sampling: Any) -> Any:
    path, body = sent(engine.wire.name, ids, pictures, **sampling)
    response = await engine.handle("POST", path, {}, body)
    assert response.status == 200, response.content
    return decoded(response.content)


def output(kind: str, answer: Any) -> tuple[list[int], list[float]]:
    if kind == "vllm":
        [choice] = answer["choices"]
        return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def prompt_scores(kind: str, answer: Any) -> list[float]:
    if kind == "vllm":
        return [next(iter(entry.values()))["logprob"] for entry in answer["prompt_logprobs"][1:]]
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def vision(kind: str, **options: Any) -> ScriptedEngine:
    policy = HashPolicy(152000, eos_ids=[2])
    return scripted_engine(kind, policy, vocab_size=152000, eos_ids=[2], images=SETTINGS, **options)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_exchanged_picture_changes_every_later_logprob(kind: str) -> None:
    one, other = picture(1), picture(2)
    forced = {"ignore_eos": True, "temperature": 0}
    ids, first = output(kind, await ask(vision(kind), IDS, [one], **forced))
    whole = IDS + ids
    scores = [
        prompt_scores(kind, await ask(vision(kind), whole, [data], scored=True, count=0)) for data in (one, other)
    ]
    assert scores[0][-len(ids) :] == pytest.approx(first, abs=1e-6)
    assert scores[0][:1] == scores[1][:1]  # before the image
    assert all(a != b for a, b in zip(scores[0][-len(ids) :], scores[1][-len(ids) :], strict=True))


async def test_both_wires_say_the_same_and_end_the_cached_prefix_at_another_picture() -> None:
    by_kind = {}
    for kind in KINDS:
        engine = vision(kind)
        engine.state.cache.page = 1
        answers = [await ask(engine, IDS, [picture(n)], seed=3) if kind == "vllm" else
                   await ask(engine, IDS, [picture(n)], sampling_seed=3) for n in (1, 1, 2)]  # fmt: skip
        cached = [
            a["usage"]["prompt_tokens_details"]["cached_tokens"] if kind == "vllm" else a["meta_info"]["cached_tokens"]
            for a in answers
        ]
        assert cached == [0, len(IDS) + 3 - 1, 2]
        by_kind[kind] = [output(kind, answer) for answer in answers]
        echoed = answers[0]["prompt_token_ids"]
        assert echoed == [5, 6, PAD, PAD, PAD, PAD, *IDS[3:]]
    assert by_kind["vllm"] == by_kind["sglang"]


@pytest.mark.parametrize("kind", KINDS)
async def test_derived_logprobs_of_a_replay_depend_on_the_picture_too(kind: str) -> None:
    engines = [scripted_engine(kind, Replay([[7, 2]]), vocab_size=152000, eos_ids=[2], images=SETTINGS) for _ in "ab"]
    first, other = [output(kind, await ask(engines[n], IDS, [picture(n)]))[1] for n in (0, 1)]
    assert all(a != b for a, b in zip(first, other, strict=True))


@given(
    st.lists(st.integers(0, 30) | st.just(PAD), max_size=20),
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=5),
)
def test_only_placeholders_grow(ids: list[int], sizes: list[tuple[int, int]]) -> None:
    pictures = [gif(*each) for each in sizes if max(each) <= 200 * min(each)]
    expanded, placed = place(ids, pictures, SETTINGS)
    assert len(placed) == min(ids.count(PAD), len(pictures))
    back = list(expanded)
    for one in reversed(placed):
        assert back[one.offset : one.offset + one.length] == [PAD] * one.length
        assert SETTINGS.least <= one.length <= SETTINGS.most or min(size(pictures[placed.index(one)])) < 32
        back[one.offset + 1 : one.offset + one.length] = []
    assert back == ids


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_size_of_a_picture_is_in_its_header(width: int, height: int) -> None:
    files = [gif(width, height), jpeg_header(width, height), *(webp_header(width, height, k) for k in
             (b"VP8X", b"VP8L", b"VP8 "))]  # fmt: skip
    assert [size(each) for each in files] == [(width, height)] * 5


def test_a_png_has_a_token_for_each_cell_within_the_limits() -> None:
    black = [png(*each, lambda x, y: (0, 0, 0)) for each in ((128, 64), (96, 96), (8, 8), (640, 480))]
    assert [SETTINGS.tokens(each) for each in black] == [8, 9, 4, 54]
    for broken in (b"", b"AAAA", b"\xff\xd8\xff", gif(0, 5), gif(1, 201), webp_header(1, 1, b"what")):
        with pytest.raises(BadImage):
            SETTINGS.tokens(broken)


@pytest.mark.parametrize(("kind", "status"), [("vllm", 400), ("sglang", 200)])
async def test_a_text_model_refuses_or_ignores_images(kind: str, status: int) -> None:
    """Measured on vLLM 0.32.0 and SGLang 0.5.23."""
    engine = scripted_engine(kind, Replay([[7, 2]]), vocab_size=152000, eos_ids=[2])
    path, body = sent(kind, IDS, [picture(1)])
    response = await engine.handle("POST", path, {}, body)
    assert response.status == status
    if kind == "vllm":
        assert decoded(response.content)["error"]["message"] == "scripted is not a multimodal model"
    else:
        assert decoded(response.content)["prompt_token_ids"] == IDS


@pytest.mark.parametrize("kind", KINDS)
async def test_the_context_counts_expanded_tokens(kind: str) -> None:
    engine = vision(kind, max_model_len=len(IDS) + 3)
    path, body = sent(kind, IDS, [picture(1)], count=1)
    response = await engine.handle("POST", path, {}, body)
    assert response.status == 400
    assert str(len(IDS) + 3) in decoded(response.content)["error"]["message"]


@pytest.mark.parametrize("kind", KINDS)
async def test_another_file_of_the_same_pixels_changes_no_logprob(kind: str) -> None:
    """As on the real servers: a model reads pixels."""
    one = picture(5)
    other = same_pixels(one)
    assert other != one
    assert pixels(other) == pixels(one) != pixels(picture(6))
    first, again = [output(kind, await ask(vision(kind), IDS, [data], temperature=0)) for data in (one, other)]
    assert first == again
