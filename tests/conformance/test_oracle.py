"""The judges alone: what is sound has no problem, and each difference breaks its check."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.image_recordings import PAD, load_images
from support.scripted import tokenizer
from tito_conformance import oracle
from tito_conformance.oracle import (
    OracleImage,
    OracleTrajectory,
    OracleTurn,
    check_text,
    collapsed,
    compare_images,
    compare_sampling,
    compare_semantics,
)
from tito_conformance.rendering import CallReader, compare_calls
from tito_conformance.testing import find_wire
from tito_conformance.wire import WireGeneration
from tito_core.ledger.turn import Semantics

pytestmark = pytest.mark.suite

END = 9
TURN = OracleTurn(
    index=0,
    parent=None,
    delta_ids=[1, 2, 3],
    provenance=[0, 0, 0],
    output_ids=[4, 5, END],
    logprobs=[-1.0, -0.5, -0.25],
    finish="stop",
    stop=END,
    request_id="r",
    cached_tokens=2,
    versions=[(0, 3, "v")],
    constrained=False,
    max_new_tokens=8,
)
ANSWER = WireGeneration(
    request_id="r",
    prompt_ids=[1, 2, 3],
    sampling={"max_tokens": 8},
    echoed_ids=[1, 2, 3],
    output_ids=[4, 5, END],
    logprobs=[-1.0, -0.5, -0.25],
    logprob_ids=[4, 5, END],
    finish="stop",
    stop=END,
    cached_tokens=2,
    versions=[(0, 3, "v")],
)
SHORTER: dict[str, Any] = {"output_ids": [4, 5], "logprobs": [-1.0, -0.5], "versions": [(0, 2, "v")]}


def problems(turn: dict[str, Any], answer: dict[str, Any]) -> list[Any]:
    return list(oracle.compare([replace(TURN, **turn)], [replace(ANSWER, **answer)], [END]))


def test_a_turn_that_equals_its_answer_has_no_problem() -> None:
    assert problems({}, {}) == []
    assert problems({"versions": [(0, 3, None)]}, {"versions": None}) == []
    assert problems({"cached_tokens": None}, {"cached_tokens": None}) == []
    assert problems({"stop": " a"}, {"sampling": {"max_tokens": 8, "stop": [" a"]}}) == []


@pytest.mark.parametrize(
    ("turn", "answer", "check", "position"),
    [
        ({"request_id": "other"}, {}, "answers", None),
        ({"delta_ids": [1, 2, 7]}, {"echoed_ids": [1, 2, 7]}, "prompt", None),
        ({}, {"echoed_ids": None}, "answers", None),
        ({}, {"echoed_ids": [1, 2]}, "answers", None),
        ({"output_ids": [4, 6, END]}, {}, "answers", 1),
        ({}, {"logprob_ids": [4, 5, 4]}, "logprobs", 2),
        ({"logprobs": [-1.0, -0.6, -0.25]}, {}, "logprobs", 1),
        ({"logprobs": [-1.0, 0.1, -0.25]}, {"logprobs": [-1.0, 0.1, -0.25]}, "logprobs", 1),
        ({"logprobs": [-1.0, -0.5, -9999.0]}, {"logprobs": [-1.0, -0.5, -9999.0]}, "logprobs", 2),
        ({"logprobs": [-math.inf, -0.5, -0.25]}, {"logprobs": [-math.inf, -0.5, -0.25]}, "logprobs", 0),
        ({"cached_tokens": 1}, {}, "cached", None),
        ({"cached_tokens": None}, {}, "cached", None),
        ({"cached_tokens": 3}, {"cached_tokens": 3}, "cached", None),
        ({"cached_tokens": -1}, {"cached_tokens": -1}, "cached", None),
        ({"versions": [(0, 3, "w")]}, {}, "versions", None),
        ({"versions": [(0, 2, "v")]}, {"versions": [(0, 2, "v")]}, "versions", None),
        ({"versions": [(1, 3, "v")]}, {"versions": [(1, 3, "v")]}, "versions", None),
        ({"finish": "length"}, {}, "finish", None),
        ({"finish": "length"}, {"finish": "length"}, "finish", None),
        ({"finish": "length", "stop": None}, {"finish": "length", "sampling": {"max_tokens": 3}}, "finish", 2),
        ({"stop": None}, {}, "finish", None),
        ({"stop": 5}, {}, "finish", None),
        ({"stop": None, **SHORTER}, {**SHORTER, "logprob_ids": [4, 5]}, "finish", 1),
        ({}, {"sampling": {"max_tokens": 2}}, "finish", None),
        ({}, {"sampling": {"max_tokens": 8, "stop_token_ids": [5]}}, "finish", 1),
    ],
)
def test_each_difference_is_a_problem(
    turn: dict[str, Any], answer: dict[str, Any], check: str, position: int | None
) -> None:
    found = problems(turn, answer)
    assert {each[0] for each in found} == {check}
    assert found[0][2:] == ((0,) if position is None else (0, position))


def test_an_end_that_is_ignored_or_too_early_for_the_request_does_not_end_an_answer() -> None:
    for sampling in ({"ignore_eos": True}, {"min_tokens": 2}, {"min_new_tokens": 2}):
        assert problems({}, {"sampling": {"max_tokens": 8, "stop_token_ids": [5], **sampling}}) == []


PATH = OracleTrajectory([1, 2, 3, 4, 5, END], [0, 0, 0, 1, 1, 1], [math.nan] * 3 + [-1.0, -0.5, -0.25], [0])


@pytest.mark.parametrize(
    ("trajectories", "constrained", "check"),
    [
        ([PATH], False, None),
        ([replace(PATH, mask=[0] * 6)], True, None),
        ([PATH], True, "mask"),
        ([replace(PATH, ids=[1, 2, 3, 4, 5, 6])], False, "mask"),
        ([replace(PATH, mask=[0, 0, 1, 1, 1, 1])], False, "mask"),
        ([replace(PATH, mask=[0, 0, 0, 0, 1, 1])], False, "mask"),
        ([PATH, PATH], False, "mask"),
        ([], False, "mask"),
        ([replace(PATH, logprobs=[math.nan, math.nan, -1.0, -1.0, -0.5, -0.25])], False, "mask"),
        ([replace(PATH, logprobs=[math.nan] * 3 + [-0.5, -1.0, -0.25])], False, "mask"),
    ],
)
def test_a_trajectory_is_its_turns(trajectories: list[OracleTrajectory], constrained: bool, check: str | None) -> None:
    found = list(oracle.check_trajectories([replace(TURN, constrained=constrained)], trajectories))
    assert (found[0][0] if found else None) == check
    assert all(index == 0 for _, _, index in found)


LETTERS = {1: "Hello", 2: " you", 3: "</s>", 4: "\N{REPLACEMENT CHARACTER}"}


@pytest.mark.parametrize(
    ("ids", "text", "finish", "stop", "sound"),
    [
        ([1, 2], "Hello you", "length", (), True),
        ([1, 2], "Hello", "length", (), False),
        ([1, 2], "", "length", (), False),
        ([1, 2], "Hell", "stop", (), False),
        ([1, 2, 3], "Hello you", "stop", (), True),
        ([1, 2, 3], "Hello you", "length", (), False),
        ([1, 2, 3], "", "stop", (), False),
        ([1, 2, 4], "Hello you", "length", (), True),
        ([1, 2], "Hello yo", "stop", ("u",), True),
        ([1, 2], "Hello yo", "stop", ("yo",), True),
        ([1, 2], "Hello ", "stop", ("yo",), True),
        ([1, 2], "Hell", "stop", ("yo",), False),
        ([1, 2], "Hell", "abort", (), True),
        ([1, 2], "other", "abort", (), False),
        ([], "", "length", (), True),
    ],
)
def test_only_the_stop_and_an_incomplete_character_may_lack(
    ids: list[int], text: str, finish: str, stop: tuple[str, ...], sound: bool
) -> None:
    sampling: dict[str, Any] = {"stop": list(stop)}
    answer = WireGeneration("r", [], sampling, output_ids=ids, finish=finish, text=text)
    found = list(check_text(answer, lambda ids: "".join(LETTERS[each] for each in ids), strips=False))
    assert (found == []) is sound


@pytest.mark.parametrize(("text", "strips", "sound"), [(" a", False, True), ("a", False, False), ("a", True, True)])
def test_a_first_blank_may_lack_only_where_the_tokenizer_strips_it(text: str, strips: bool, sound: bool) -> None:
    answer = WireGeneration("r", [], {}, output_ids=[1], finish="length", text=text)
    assert (not list(check_text(answer, lambda ids: " a", strips=strips))) is sound


@dataclass
class Exchange:
    path: str
    sent: bytes
    got: bytearray
    headers: dict[str, str] = field(default_factory=lambda: {"x-request-id": "r"})
    status: int = 200
    whole: bool = True


def read_recording(kind: Any, name: str) -> WireGeneration:
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
    generation = read_recording(kind, name)
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
    by_name, both = read_recording("vllm", "content_parts_uuid_only"), read_recording("vllm", "content_parts_uuid")
    assert (by_name.images, by_name.image_names) == ([None], ["img-A"])
    assert (len(both.images), both.image_names) == (1, ["img-A"])
    hashed = read_recording("sglang", "content_hash_with_data")
    [data] = hashed.images
    assert hashed.image_names == [f"sha256:{sha256(data or b'').hexdigest()}"]


EXPANDED = [1, 2, PAD, PAD, PAD, 3, PAD, PAD, 4]
IMAGES = [OracleImage(2, 3, sha256(b"a").hexdigest()), OracleImage(6, 2, sha256(b"b").hexdigest())]
SOUND_IMAGES = WireGeneration(
    "r", [1, 2, PAD, 3, PAD, 4], {}, [b"a", b"b"], [None, IMAGES[1].sha256], [(2, 3), (6, 2)], 5, EXPANDED
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
    assert list(compare_images(EXPANDED, IMAGES, SOUND_IMAGES)) == []
    assert {check for check, _ in compare_images(EXPANDED, IMAGES, replace(SOUND_IMAGES, **changes))} == {"images"}


@pytest.mark.parametrize(
    ("ids", "images"),
    [
        (EXPANDED, [IMAGES[0], replace(IMAGES[1], offset=5)]),
        (EXPANDED, [IMAGES[0], replace(IMAGES[1], length=1)]),
        (EXPANDED, IMAGES[::-1]),
        (EXPANDED, IMAGES[:1]),
        (EXPANDED, [replace(IMAGES[0], sha256=IMAGES[1].sha256), IMAGES[1]]),
        ([*EXPANDED, PAD], IMAGES),
        ([7 if token == PAD else token for token in EXPANDED][:2] + EXPANDED[2:4] + [7] + EXPANDED[5:], IMAGES),
    ],
)
def test_each_error_of_the_ledger_is_noticed(ids: list[int], images: list[OracleImage]) -> None:
    assert {check for check, _ in compare_images(ids, images, SOUND_IMAGES)} == {"images"}


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


THREE_CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    '<tool_call>\n{"name": "h", "arguments": {"a": 1,}}\n</tool_call>'
)
F, G = {"name": "f", "input": {"a": 1}}, {"name": "g", "input": {}}
WRONG = {"name": "malformed", "input": {}}


@pytest.mark.parametrize(
    ("uses", "sound"),
    [
        ([F, G, WRONG], True),
        ([F, G], True),
        ([F], False),
        ([G, F, WRONG], False),
        ([F, G, {"name": "h", "input": {"a": 1}}], False),
        ([F, {"name": "g", "input": {"b": None}}, WRONG], False),
    ],
)
def test_dropped_reversed_repaired_and_changed_calls_are_noticed(uses: list[Any], sound: bool) -> None:
    read = CallReader(tokenizer()).read(THREE_CALLS)
    assert read is not None
    assert list(compare_calls(read, uses, "malformed", whole=True)) == [] or not sound
    assert sound or list(compare_calls(read, uses, "malformed", whole=True))


@pytest.mark.parametrize(
    ("requested", "sent", "recorded", "limit", "problems"),
    [
        ({}, {}, {}, 9, 0),
        ({"top_k": 0}, {"top_k": -1}, {}, 9, 0),
        ({"top_k": 5}, {"top_k": 5}, {"top_k": 5}, 9, 0),
        ({"top_k": 5}, {"top_k": 4}, {"top_k": 5}, 9, 1),
        ({"top_k": 5}, {}, {}, 9, 2),
        ({"temperature": 0.5}, {"temperature": 0.5}, {}, 9, 1),
        (
            {"seed": 3, "min_new_tokens": 2},
            {"sampling_seed": 3, "min_tokens": 2},
            {"seed": 3, "min_new_tokens": 2},
            9,
            0,
        ),
        ({"stop": ["a"]}, {"stop": ["b", "a"]}, {}, 9, 0),
        ({"stop": ["a"]}, {"stop": ["b"]}, {}, 9, 1),
        ({}, {}, {}, 10, 1),
        ({}, {}, {}, 8, 1),
    ],
)
def test_parameters_that_are_not_sent_or_recorded_are_noticed(
    requested: dict[str, Any], sent: dict[str, Any], recorded: dict[str, Any], limit: int, problems: int
) -> None:
    found = list(compare_sampling({"max_new_tokens": 9, **requested}, {"max_tokens": 9, **sent}, recorded, limit))
    assert [check for check, _ in found] == ["requested"] * problems, found


@pytest.mark.parametrize(
    ("requested", "measured", "semantics", "grammar", "sound"),
    [
        ({}, False, (False, 1.0, False), False, True),
        ({"temperature": 0.5}, False, (False, 1.0, False), False, True),
        ({"temperature": 0.5}, False, (False, 0.5, False), False, False),
        ({"temperature": 0.5}, True, (True, 0.5, False), False, True),
        ({"temperature": 0.5}, True, (True, 1.0, False), False, False),
        ({}, True, (False, 1.0, False), False, False),
        ({"temperature": 0.5}, None, (None, None, False), False, True),
        ({"temperature": 0.5}, None, (None, 1.0, False), False, False),
        ({}, None, (None, 1.0, False), False, True),
        ({}, False, (False, 1.0, False), True, False),
        ({}, False, (False, 1.0, True), True, True),
        ({"presence_penalty": 1.0}, True, (True, 1.0, False), False, False),
        ({"frequency_penalty": 1.0}, True, (True, 1.0, False), False, False),
        ({"frequency_penalty": 1.0}, True, (True, 1.0, True), False, True),
        ({"frequency_penalty": 1.0}, False, (False, 1.0, False), False, True),
    ],
)
def test_wrong_semantics_are_noticed(
    requested: dict[str, Any], measured: bool | None, semantics: tuple[Any, ...], grammar: bool, sound: bool
) -> None:
    problems = list(compare_semantics(requested, Semantics(*semantics, "measured"), measured, grammar))
    assert [check for check, _ in problems] == ["semantics"] * (not sound), problems


@pytest.mark.parametrize(("versions", "broken"), [("aab", False), ("aba", True), ("abcb", True), ("aaa", False)])
def test_a_weight_version_never_comes_back(versions: str, broken: bool) -> None:
    spans = [[(0, 3, version)] for version in versions]
    turns = [replace(TURN, index=at, request_id=str(at), versions=each) for at, each in enumerate(spans)]
    answers = [replace(ANSWER, request_id=str(at), versions=each) for at, each in enumerate(spans)]
    found = list(oracle.compare(turns, answers, [END]))
    assert {check for check, _, _ in found} == ({"versions"} if broken else set())
