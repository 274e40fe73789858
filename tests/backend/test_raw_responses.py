"""Wrong raw responses of any kind are refused; only what agrees with the request becomes a response."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from support.backends import EOS, PROMPT, VOCAB, request_of
from tito_core.backend import Capabilities, EngineInfo, OptionalOutputs, ProtocolViolationError, RawResponse, RawScores
from tito_core.backend.generate import generate, score, tokenize
from tito_core.backend.protocol import MAY_BE_UNREPORTED, TokenChunk
from tito_core.backend.validation import validated
from tito_core.ledger.columns import check_logprobs
from tito_core.ledger.laws import check_versions
from tito_core.ledger.turn import Finish

OUTPUT = [21, 22, EOS]
GIVES = Capabilities(top_logprobs=2, prompt_logprobs=True, routed_experts=True, expert_shape=True, sampling_mask=True)
INFO = EngineInfo("liar", "m", 100, "1", vocab_size=VOCAB, capabilities=GIVES)
EVERYTHING = OptionalOutputs(top_logprobs=2, prompt_logprobs=True, routed_experts=(2, 2), sampling_mask=True)
REQUEST = replace(request_of(top_k=4), optional_outputs=EVERYTHING)


class Liar:
    """A third party's backend, without a server: it returns what it was made with."""

    name = "liar"

    def __init__(self, raw: Any, *, info: EngineInfo = INFO, chunks: Sequence[Any] = ()) -> None:
        self.raw, self.info, self.chunks = raw, info, chunks

    async def connect(self) -> EngineInfo:
        return self.info

    async def generate(self, request: Any, on_chunk: Any = None) -> Any:
        for chunk in self.chunks:
            on_chunk(chunk)
        return self.raw

    async def score(self, token_ids: Any) -> Any:
        return self.raw

    async def tokenize(self, text: str) -> Any:
        return self.raw

    async def abort(self, request_id: str) -> None: ...

    async def aclose(self) -> None: ...


def truth(**changes: Any) -> RawResponse:
    """Return what an honest backend reports for this request."""
    given: dict[str, Any] = {
        "finish": "stop",
        "stop": EOS,
        "output_ids": OUTPUT,
        "logprobs": [-1.0, -2.0, -3.0],
        "logprob_ids": OUTPUT,
        "echoed": list(PROMPT),
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 3,
        "cached_tokens": 4,
        "versions": [(0, 2, "a"), (2, 3, "b")],
        "top_logprobs": [
            [(token, logprob), (9, -0.5)] for token, logprob in zip(OUTPUT, (-1.0, -2.0, -3.0), strict=True)
        ],
        "prompt_logprobs": [(token, -1.5) for token in PROMPT[1:]],
        "routed_experts": np.arange(28, dtype=np.int64).reshape(7, 2, 2),
        "sampling_mask": [[token, 9] for token in OUTPUT],
        "latency_s": 0.5,
        "request_id": "r-try2",
        "response_id": "generate-r-try2",
    }
    return RawResponse(**{**given, **changes})


def ask(raw: Any, request: Any = REQUEST, **about: Any) -> Any:
    return asyncio.run(generate(Liar(raw, **about), request))


def refused(act: Any, *args: Any, **settings: Any) -> ProtocolViolationError:
    with pytest.raises(ProtocolViolationError) as caught:
        act(*args, **settings)
    assert caught.value.backend == "liar"
    assert str(caught.value).startswith("Law ")
    return caught.value


AS_LISTS: dict[str, Any] = {
    "lists": list,
    "tuples": tuple,
    "int64": lambda values: np.array(values, np.int64),
    "uint16": lambda values: np.array(values, np.uint16),
    "numpy scalars": lambda values: [np.int32(value) for value in values],
}


@pytest.mark.parametrize("given_as", AS_LISTS)
def test_lists_of_any_kind_are_equal(given_as: str) -> None:
    of = AS_LISTS[given_as]
    raw = truth(
        output_ids=of(OUTPUT),
        logprob_ids=of(OUTPUT),
        echoed=of(list(PROMPT)),
        sampling_mask=[of([token, 9]) for token in OUTPUT],
        logprobs=np.array([-1.0, -2.0, -3.0], np.float64) if "int" in given_as else [-1, np.float32(-2), -3.0],
        prompt_tokens=np.int64(5),
        stop=np.int32(EOS),
        latency_s=np.float32(0.5),
        versions=[(np.int64(0), 2, "a"), (2, 3, "b")],
    )
    response = ask(raw)
    assert response.output_ids.tolist() == OUTPUT
    assert (response.output_ids.dtype, response.logprobs.dtype) == (np.int32, np.float32)
    assert response.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert (response.finish, response.stop, type(response.stop)) == (Finish.STOP, EOS, int)
    assert (response.request_id, response.latency_s, type(response.latency_s)) == ("r-try2", 0.5, float)
    assert response.columns["routed_experts"].values.shape == (7, 2, 2)
    assert [type(each) for span in response.versions for each in span[:2]] == [int] * 4


class Unlisted(np.ndarray[Any, Any]):
    """An array that is not made a list."""

    def tolist(self) -> Any:
        raise AssertionError("a long prompt was made a list")


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_an_echo_that_is_an_array_is_compared_as_one(kind: Any) -> None:
    """Law 14: a prompt of 128,000 ids as two Python lists takes longer than all other checks of its turn."""
    prompt = np.arange(3, 103, dtype=np.int32)
    request = replace(request_of(), input_ids=prompt.view(Unlisted))
    echoed = prompt.astype(kind)
    raw = replace(truth(prompt_tokens=len(prompt)), echoed=echoed.view(Unlisted))
    assert validated(raw, request, INFO).prompt_length == len(prompt)
    echoed[70] += 1
    wrong = refused(validated, replace(raw, echoed=echoed), replace(request, input_ids=prompt), INFO)
    assert all(value in str(wrong) for value in ("73", "offset 70", "74"))


def test_optional_fields_may_be_missing() -> None:
    raw = RawResponse(
        response_id="r",
        finish="stop",
        output_ids=OUTPUT,
        logprobs=[-1.0, -2.0, -3.0],
        echoed=msgspec.json.encode(list(PROMPT)),
        prompt_tokens=5,
        completion_tokens=3,
    )
    response = ask(raw, request_of())
    assert (response.request_id, response.stop, response.cached_tokens) == ("r", None, None)
    assert [span.version for span in response.versions] == [None]


@pytest.mark.parametrize("name", sorted(MAY_BE_UNREPORTED - {"media"}))
def test_counts_are_required_unless_unreported(name: str) -> None:
    refused(ask, truth(**{name: None}))
    unable = replace(INFO, unreported=frozenset({name}))
    assert ask(truth(**{name: None}), info=unable).output_ids.tolist() == OUTPUT
    refused(ask, truth(**{name: [1] if name == "echoed" else 77}), info=unable)


class Strange:
    """An object that raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __eq__(self, other: object) -> bool:
        raise OSError("no comparison")

    __hash__ = None


class StrangeList(list[Any]):
    """A list that cannot be read."""

    def __iter__(self) -> Any:
        raise OSError("no items")

    def __len__(self) -> int:
        raise RuntimeError("no length")


GARBAGE: list[Any] = [
    None, True, False, 0, -1, 3, 2**31, 2**80, 10**5000, 0.5, float("nan"), float("inf"), -float("inf"), "", "x",
    "\ud800", b"", b"[", b"null", b"[1]", b"\xff", [], [None], [[]], [True, False, True], [0.0, 0.0, 0.0],
    ["a", "b", "c"], [1, 2],
    [-1.0, float("nan"), -1.0], [-1.0, -2.0, -float("inf")], [-9999.0] * 3, [False, -1.0, -1.0], [2**40] * 3, [-5] * 3,
    {}, {"a": 1}, {1, 2, 3}, (), iter([1, 2, 3]), (n for n in (1, 2, 3)), object(), object, Strange(),
    StrangeList([1, 2]),
    np.zeros(3), np.zeros((3, 1), np.int32), np.array(7), np.array([1, None], object), np.array([True, False, True]),
    np.array([np.nan] * 3), np.float32(-1), np.array(["a", "b", "c"]), np.array([2**40] * 3), Decimal(1), 1j,
    msgspec.Raw(b"{}"), msgspec.Raw(b"[11,12,13,14,16]"), lambda: 1 / 0, lambda: None, lambda: [[("x", 1)]] * 3,
    Finish.STOP,
    [(0, 3)], [(0, 3, 7)], [(0, 1, "a"), (2, 3, "b")], [("0", 3, "a")], [(True, 3, None)], [(0, 3, None, 1)], "abc",
    [[(21, False), (9, -0.5)]] * 3, [[(21, -1.0), (21, -2.0)]] * 3, [(12, True)] * 4, [(12, "x")] * 4, [[21, 21]] * 3,
    memoryview(b"abc"), bytearray(b"[1]"), range(3), Ellipsis, type("Fake", (), {"output_ids": [1]})(),
]  # fmt: skip


def sound(response: Any) -> None:
    """A validated response has the types and values that a ledger needs, however it was made."""
    ids, logprobs = response.output_ids, response.logprobs
    assert (ids.dtype, logprobs.dtype, ids.shape) == (np.int32, np.float32, logprobs.shape)
    assert 1 <= len(ids) <= REQUEST.sampling.max_new_tokens or response.finish == Finish.ABORT
    assert ((ids >= 0) & (ids < VOCAB)).all()
    check_logprobs(logprobs)
    check_versions(response.versions, len(ids))
    assert all(type(span.version) in (str, type(None)) for span in response.versions)
    assert isinstance(response.finish, Finish)
    assert type(response.stop) in (int, str, type(None))
    assert type(response.request_id) is str
    assert type(response.latency_s) is float
    assert response.latency_s >= 0
    assert type(response.cached_tokens) in (int, type(None))
    assert type(response.message) in (str, type(None))
    assert all(column.rows == len(ids) for name, column in response.columns.items() if name == "sampling_mask")


@pytest.mark.parametrize("name", [field.name for field in fields(RawResponse)])
def test_any_wrong_field_is_refused(name: str) -> None:
    """In each place anything: it is refused in a sentence, or was no lie."""
    came, refusals = [], list[ProtocolViolationError]()
    for garbage in GARBAGE:
        try:
            response = ask(truth(**{name: garbage}))
        except ProtocolViolationError as error:
            refusals.append(error)
            continue
        sound(response)
        came.append(garbage)
    if name in ("output_ids", "logprobs", "echoed"):
        assert f"{name} must be a list of" in str(refused(ask, truth(**{name: 5.5})))
    most = {"message": 5, "stop": 6, "request_id": 6, "cached_tokens": 4, "latency_s": 6, "versions": 4, "finish": 4}
    most |= {"response_id": 0, "served_by": 5, "model": 5, "unordered": 2}
    assert len(came) <= most.get(name, 2), came
    assert {error.request_id for error in refusals} <= {"r"}
    assert all(str(error).startswith("Law ") for error in refusals)


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda value: type(value).__name__)
def test_an_answer_of_a_wrong_type_is_refused(garbage: Any) -> None:
    refused(ask, garbage)
    refused(lambda: asyncio.run(score(Liar(garbage), PROMPT)))


def test_a_lookalike_of_a_response_is_refused() -> None:
    """Law 4: a `RawResponse` or `RawScores` is required; an object with the same attributes is refused."""
    honest = truth()
    alike = SimpleNamespace(**{field.name: getattr(honest, field.name) for field in fields(honest)})
    assert "must return a RawResponse" in str(refused(ask, alike))
    scores = SimpleNamespace(logprobs=[None, -1.0, -2.0, -1.0, -1.0], token_ids=None, request_id=None)
    assert "must return a RawScores" in str(refused(lambda: asyncio.run(score(Liar(scores), PROMPT))))


SHAPES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"echoed": [*PROMPT[:-1], 9]}, ("15", "offset 4", "9")),
    ({"echoed": PROMPT[:-1]}, ("5", "4")),
    ({"echoed": msgspec.Raw(b"[11, 12, 13, 14, 9]")}, ("15", "offset 4", "9")),
    ({"echoed": None}, ("did not echo",)),
    ({"output_ids": [21.0, 22, EOS]}, ("output_ids", "[21.0, 22, 2]")),
    ({"output_ids": [True, 22, EOS]}, ("output_ids", "True")),
    ({"output_ids": [21, VOCAB, EOS], "logprob_ids": None}, (str(VOCAB), "vocabulary")),
    ({"logprobs": [-1.0, float("nan"), -3.0]}, ("nan", "offset 1")),
    ({"logprobs": [-1.0, "x", -3.0]}, ("logprobs", "'x'")),
    ({"logprobs": [False, -2.0, -3.0]}, ("logprobs", "False")),
    ({"completion_tokens": 3.0}, ("completion_tokens=3.0", "3")),
    ({"prompt_tokens": True}, ("prompt_tokens=True", "5")),
    ({"cached_tokens": -1}, ("cached_tokens=-1",)),
    ({"latency_s": float("nan")}, ("latency_s", "nan")),
    ({"request_id": 7}, ("request_id", "7")),
    ({"message": 7}, ("message", "7")),
    ({"stop": 2.0}, ("stop", "2.0")),
    ({"versions": [(0, 3, 7)]}, ("(0, 3, 7)",)),
    ({"routed_experts": np.zeros((7, 2, 2))}, ("routed_experts", "integer")),
    ({"sampling_mask": [[21.0], [22], [EOS]]}, ("sampling_mask", "21.0")),
    ({"top_logprobs": [[(21, False), (9, -0.5)]] * 3}, ("top_logprobs", "False")),
    ({"routed_experts": np.full((7, 2, 2), -1)}, ("routed_experts", "-1")),
    (
        {"top_logprobs": [[(VOCAB, -0.5), (t, p)] for t, p in zip(OUTPUT, (-1.0, -2.0, -3.0), strict=True)]},
        (f"{VOCAB}",),
    ),
    ({"sampling_mask": [[token, VOCAB] for token in OUTPUT]}, (str(VOCAB), "vocabulary")),
    ({"latency_s": 1e308}, ("latency_s", "1e+308")),
    ({"logprob_ids": StrangeList(OUTPUT)}, ("OSError", "no items")),
    ({"top_logprobs": 7}, ("top_logprobs", "not 7.")),
    ({"top_logprobs": [7, 7, 7]}, ("top_logprobs", "pairs, not 7.")),
    ({"sampling_mask": 7}, ("sampling_mask", "not 7.")),
]


@pytest.mark.parametrize(("changes", "values"), SHAPES)
def test_an_error_has_the_values(changes: dict[str, Any], values: tuple[str, ...]) -> None:
    sentence = str(refused(ask, truth(**changes)))
    assert all(value in sentence for value in values), sentence


@pytest.mark.parametrize(
    "chunk",
    [None, [1], *map(TokenChunk, ("x", np.zeros(2), np.array([-1]), [2**31], StrangeList([21]), Strange()))],
)
def test_an_invalid_chunk_does_not_reach_the_caller(chunk: Any) -> None:
    seen: list[Any] = []
    backend: Any = Liar(truth(), chunks=[TokenChunk(np.array([21])), chunk])
    refused(lambda: asyncio.run(generate(backend, REQUEST, seen.append)))
    assert [each.output_ids.tolist() for each in seen] == [[21]]


@pytest.mark.parametrize("chunks", [[[22]], [[21], [21]], [[21, 22], [EOS, 9]]])
def test_chunks_that_differ_from_the_answer_are_refused(chunks: list[list[int]]) -> None:
    backend: Any = Liar(truth(), chunks=[TokenChunk(np.array(ids)) for ids in chunks])
    sentence = str(refused(lambda: asyncio.run(generate(backend, REQUEST, [].append))))
    assert str([token for ids in chunks for token in ids]) in sentence


@pytest.mark.parametrize("shape", [(7, 2, 0), (7, 0, 2)])
def test_negative_experts_are_refused(shape: tuple[int, ...]) -> None:
    request = replace(REQUEST, optional_outputs=OptionalOutputs(routed_experts=True))
    assert str(shape) in str(refused(ask, truth(routed_experts=np.zeros(shape, np.int32)), request))


def scored(**changes: Any) -> Any:
    raw = RawScores(**{"logprobs": [None, -1.0, -2.0], "token_ids": [None, 12, 13], **changes})
    return asyncio.run(score(Liar(raw), [11, 12, 13]))


@pytest.mark.parametrize("first", [None, float("nan"), np.float32("nan")])
@pytest.mark.parametrize("ids", [None, [11, 12, 13], (None, 12, 13), np.array([11, 12, 13])])
def test_scores_of_any_kind_are_equal(first: Any, ids: Any) -> None:
    found = scored(logprobs=[first, -1.0, np.float64(-2.0)], token_ids=ids)
    assert found.dtype == np.float32
    assert np.isnan(found[0])
    assert found[1:].tolist() == [-1.0, -2.0]


@pytest.mark.parametrize("name", ["logprobs", "token_ids"])
def test_any_wrong_part_of_scores_is_refused(name: str) -> None:
    for garbage in GARBAGE:
        if not (name == "token_ids" and garbage is None):
            refused(scored, **{name: garbage})


@pytest.mark.parametrize("wrong", [0.5, float("nan"), -float("inf"), -9999.0])
@pytest.mark.parametrize("at", [1, 2])
def test_a_wrong_score_is_reported_with_its_offset(at: int, wrong: float) -> None:
    logprobs: list[float | None] = [None, -1.0, -2.0]
    logprobs[at] = wrong
    assert f"{wrong} at output offset {at} " in str(refused(scored, logprobs=logprobs))


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [([9, 12, 13], "id 11 at offset 0 was sent, the server scored 9"), ([11, None, 13], "id 12 at offset 1 .* None")],
)
def test_scores_of_another_id_are_refused(ids: list[Any], sentence: str) -> None:
    assert re.search(sentence, str(refused(scored, token_ids=ids)))


@pytest.mark.parametrize("short", [{"logprobs": [None, -1.0], "token_ids": None}, {"token_ids": [11, 12]}])
def test_too_few_scores_are_counted(short: dict[str, Any]) -> None:
    assert "3 ids were sent for scoring, the server scored 2." in str(refused(scored, **short))


def test_ids_of_a_text_are_ids_or_none() -> None:
    def of(raw: Any) -> Any:
        return asyncio.run(tokenize(Liar(raw), "text"))

    assert of(None) is None
    for good in ([], [1, 2], (1, 2), np.array([1, 2], np.int64), range(3)):
        assert of(good).dtype == np.int32
        assert of(good).tolist() == list(good)
    for bad in ("12", [1.0], [True], [-1], [2**31], np.zeros(2), {"ids": [1]}, Strange(), StrangeList([1])):
        refused(of, bad)
