"""The readers of both wires read images from recordings, and the oracle of images notices each kind of error."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.image_recordings import PAD, load_images
from tito_conformance.oracle import OracleImage, collapsed, compare_images
from tito_conformance.testing.wire import find_wire
from tito_conformance.wire import WireGeneration


@dataclass
class Exchange:
    path: str
    sent: bytes
    got: bytearray
    headers: dict[str, str] = field(default_factory=lambda: {"x-request-id": "r"})
    status: int = 200
    whole: bool = True


def read(kind: Any, name: str) -> WireGeneration:
    recording = next(each for each in load_images(kind) if each.name == name)
    sent = json.dumps({"rid": "r", **recording.fields}).encode()
    events = recording.response if isinstance(recording.response, list) else None
    got = (
        json.dumps(recording.response)
        if events is None
        else "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    )
    generation = find_wire(kind).read(Exchange(recording.path, sent, bytearray(got.encode())))
    assert generation is not None
    return generation


@pytest.mark.parametrize(
    ("kind", "name"),
    [("vllm", "turn2_tool_result_image"), ("sglang", "turn2_tool_result_image"), ("vllm", "content_parts_stream"),
     ("sglang", "stream_one_image"), ("sglang", "image_dict_url")],
)  # fmt: skip
def test_both_readers_read_the_same_images(kind: str, name: str) -> None:
    generation = read(kind, name)
    spans = [(125, 8), (169, 9)] if name.startswith("turn2") else [(4, 8)]
    assert len(generation.images) == len(spans)
    assert all(data is not None and data.startswith(b"\x89PNG") for data in generation.images)
    assert generation.image_names == [None] * len(spans)
    assert generation.image_spans == (spans if kind == "vllm" else None)
    assert generation.image_tokens == (None if kind == "vllm" else sum(length for _, length in spans))
    images = ledger_images(generation, spans)
    assert generation.echoed_ids is not None
    assert collapsed(generation.echoed_ids, images) == generation.prompt_ids
    assert list(compare_images(generation.echoed_ids, images, generation)) == []


def ledger_images(generation: WireGeneration, spans: list[tuple[int, int]]) -> list[OracleImage]:
    digests = [sha256(data or b"").hexdigest() for data in generation.images]
    return [OracleImage(*span, digest) for span, digest in zip(spans, digests, strict=True)]


def test_names_are_read_too() -> None:
    by_name, both = read("vllm", "content_parts_uuid_only"), read("vllm", "content_parts_uuid")
    assert (by_name.images, by_name.image_names) == ([None], ["img-A"])
    assert (len(both.images), both.image_names) == (1, ["img-A"])
    hashed = read("sglang", "content_hash_with_data")
    [data] = hashed.images
    assert hashed.image_names == [f"sha256:{sha256(data or b'').hexdigest()}"]


IDS = [1, 2, PAD, PAD, PAD, 3, PAD, PAD, 4]
IMAGES = [OracleImage(2, 3, sha256(b"a").hexdigest()), OracleImage(6, 2, sha256(b"b").hexdigest())]
SOUND = WireGeneration(
    "r", [1, 2, PAD, 3, PAD, 4], {}, [b"a", b"b"], [None, IMAGES[1].sha256], [(2, 3), (6, 2)], 5, IDS
)


@pytest.mark.parametrize(
    "changes",
    [
        {"images": [b"b", b"a"]},
        {"images": [b"a"]},
        {"images": [b"a", b"b", b"b"]},
        {"images": [b"a", b"c"]},
        {"image_names": ["other", None]},
        {"images": [None, b"b"]},
        {"image_spans": [(2, 3), (5, 2)]},
        {"image_spans": [(2, 3)]},
        {"image_tokens": 4},
        {"image_spans": None, "image_tokens": None},
    ],
    ids=str,
)
def test_each_error_on_the_wire_is_noticed(changes: dict[str, Any]) -> None:
    assert list(compare_images(IDS, IMAGES, SOUND)) == []
    assert {check for check, _ in compare_images(IDS, IMAGES, replace(SOUND, **changes))} == {"images"}


@pytest.mark.parametrize(
    ("ids", "images"),
    [
        (IDS, [IMAGES[0], replace(IMAGES[1], offset=5)]),
        (IDS, [IMAGES[0], replace(IMAGES[1], length=1)]),
        (IDS, IMAGES[::-1]),
        (IDS, IMAGES[:1]),
        (IDS, [replace(IMAGES[0], sha256=IMAGES[1].sha256), IMAGES[1]]),
        ([*IDS, PAD], IMAGES),
        ([7 if token == PAD else token for token in IDS][:2] + IDS[2:4] + [7] + IDS[5:], IMAGES),
    ],
)
def test_each_error_of_the_ledger_is_noticed(ids: list[int], images: list[OracleImage]) -> None:
    assert {check for check, _ in compare_images(ids, images, SOUND)} == {"images"}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=5), st.integers(0, 3))
def test_a_path_collapses_to_one_placeholder_an_image(parts: list[tuple[int, int]], rest: int) -> None:
    ids: list[int] = []
    images, expected = [], []
    for text, length in parts:
        ids += [8] * text
        images.append(OracleImage(len(ids), length, ""))
        ids += [PAD] * length
        expected += [8] * text + [PAD]
    assert collapsed([*ids, *[9] * rest], images) == [*expected, *[9] * rest]


def test_the_recorded_pictures_are_whole() -> None:
    for recording in (*load_images("vllm"), *load_images("sglang")):
        for url in recording.fields.get("image_data") or ():
            base64.b64decode((url["url"] if isinstance(url, dict) else url).partition(",")[2], validate=True)
