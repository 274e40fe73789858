"""Scores equal the engine's own distribution; the semantics of logprobs are measured or unknown."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.test_answer_laws import put, scored
from support.backends import (
    EOS,
    KINDS,
    PROMPT,
    VOCAB,
    WIRES,
    Kind,
    engine_of,
    hash_policy,
    in_process_backend,
    request_of,
)
from tito_conformance.testing import Fault, always
from tito_core.backend import BackendError, EngineInfo, Grammar, ProtocolViolationError, SamplingParams
from tito_core.backend.errors import BadRequestError, UnsupportedByServerError
from tito_core.backend.generate import generate, score
from tito_core.backend.semantics import measure, semantics_of
from tito_core.ledger.turn import Adapter, Semantics

Edit = Callable[[Any], Any]


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60))
@example(ids=[VOCAB - 1, 0, VOCAB - 1, 5]).via("SGLang reports the vocabulary's last id as 0")
@settings(deadline=None, max_examples=15)
def test_scores_are_the_policys_own(kind: Kind, ids: list[int]) -> None:
    engine = engine_of(kind)
    scores = asyncio.run(score(in_process_backend(engine), ids))
    assert scores.dtype == np.float32
    assert scores.shape == (len(ids),)
    assert np.isnan(scores[0])
    own = hash_policy().score(ids, 1, 1.0) if len(ids) > 1 else []
    assert scores[1:].tolist() == own


PLANTED: dict[str, tuple[Edit, str]] = {
    "another id": (scored(2, token=99), "id 13 at offset 2 .*scored 99"),
    "none": (put("prompt", None), "the server scored 0"),
    "null inside": (
        put("prompt", lambda old: [*old[:2], [None, 13, None], *old[3:]], lambda old: [*old[:2], None, *old[3:]]),
        "(id 13|scored id 13).*None",
    ),
    "first has one": (scored(0, token=11), "id 11 at offset 0 .*-1.0"),
    "NaN": (scored(2, logprob=float("nan")), "NaN"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("kind", KINDS)
async def test_scores_of_other_ids_are_refused(kind: Kind, name: str) -> None:
    edit, sentence = PLANTED[name]
    with pytest.raises(ProtocolViolationError, match=sentence) as caught:
        await score(in_process_backend(engine_of(kind, fault=always(Fault(edit=edit)))), PROMPT)
    assert caught.value.backend == kind
    assert name in ("NaN", "-inf") or len(caught.value.request_id or "") == 32


# Given ids in the place of each token.


def given_engine(kind: Kind, **options: Any) -> Any:
    return engine_of(kind, model_runner=2, **options)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_given_ids_have_the_policys_own_logprobs_in_each_place(kind: Kind, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30))
    likely = [token for at in (1, len(ids)) for token, _ in hash_policy().top([*ids, 0], at, 3, 1.0)]
    of = data.draw(st.lists(st.sampled_from([*likely, *ids, VOCAB - 1, 0]), min_size=1, max_size=20))
    backend: Any = in_process_backend(given_engine(kind))
    found = asyncio.run(score(backend, ids, of=of))
    assert (found.dtype, found.shape) == (np.float32, (len(ids), 1 + len(of)))
    assert np.isnan(found[0]).all()
    for at in range(1, len(ids)):
        expected = [hash_policy().score([*ids[:at], token], at, 1.0)[0] for token in (ids[at], *of)]
        np.testing.assert_allclose(found[at], expected, rtol=1e-6)


LIKELY = [11]
for _ in range(4):
    LIKELY += [hash_policy().top([*LIKELY, 0], len(LIKELY), 1, 1.0)[0][0]]
OF = (*LIKELY[2:4], 40)


def table_of(answer: Any) -> np.ndarray:
    if "choices" in answer:
        return np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    rows = answer["meta_info"]["input_token_ids_logprobs"][1:]
    return np.array([[logprob for logprob, *_ in row] for row in rows])


def with_table(change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    def edit(answer: Any) -> None:
        table = change(table_of(answer))
        if "choices" in answer:
            stream = io.BytesIO()
            np.save(stream, table)
            answer["prompt_token_id_logprobs"] = base64.b64encode(stream.getvalue()).decode()
        else:
            rows = [[[value, token, None] for value, token in zip(row, OF, strict=False)] for row in table.tolist()]
            answer["meta_info"]["input_token_ids_logprobs"] = [None, *rows]

    return edit


def without_table(answer: Any) -> None:
    if "choices" in answer:
        answer["prompt_token_id_logprobs"] = None
    else:
        del answer["meta_info"]["input_token_ids_logprobs"]


def put(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda table: np.where(table == table[1, 2], value, table)


GIVEN: dict[str, tuple[Edit, str]] = {
    "no table": (without_table, "took no notice of 3 given ids"),
    "a row less": (with_table(lambda table: table[:-1]), r"4 places have scores of 3 ids .* shape \(3, 3\)"),
    "a row more": (with_table(lambda table: np.vstack([table, table[:1]])), r"shape \(5, 3\)"),
    "an id less": (with_table(lambda table: table[:, :2]), r"shape \(4, 2\)|, 40\] were requested"),
    "the next place": (
        with_table(lambda table: np.roll(table, -1, 0)),
        r"id \d+ at offset [23] .* among the given ids",
    ),
    "NaN": (with_table(put(float("nan"))), "nan|NaN"),
    "-inf": (with_table(put(float("-inf"))), "-inf|Infinity"),
    "a logit": (with_table(put(3.0)), "logprob 3.0"),
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("kind", KINDS)
async def test_scores_of_given_ids_that_are_not_theirs_are_refused(kind: Kind, name: str) -> None:
    edit, sentence = GIVEN[name]
    with pytest.raises(BackendError, match=sentence):
        await score(in_process_backend(given_engine(kind, fault=always(Fault(edit=edit)))), LIKELY, of=OF)


@pytest.mark.parametrize("value", ["?", "k05VTVBZ", base64.b64encode(b"\x93NUMPY" + bytes(60)).decode()])
async def test_a_table_that_cannot_be_read_is_refused(value: str) -> None:
    edit: Edit = lambda answer: answer.update(prompt_token_id_logprobs=value)  # noqa: E731
    with pytest.raises(ProtocolViolationError, match="cannot be read"):
        await score(in_process_backend(given_engine("vllm", fault=always(Fault(edit=edit)))), LIKELY, of=OF)


async def test_who_cannot_score_given_ids_says_so() -> None:
    """On a CPU vLLM 0.32.0 answers as here: its model runner there is the first."""
    engine = engine_of("vllm")
    with pytest.raises(BadRequestError, match="requires the V2 model runner"):
        await score(in_process_backend(engine), LIKELY, of=OF)
    backend = in_process_backend(engine_of("sglang"))
    with pytest.raises(UnsupportedByServerError, match="by an adapter"):
        await score(backend, LIKELY, of=OF, adapter=Adapter("a"))
    with pytest.raises(BadRequestError, match=r"Given id 1000 at .* of 1000 tokens"):  # it would crash the server
        await score(backend, LIKELY, of=[VOCAB])


class Plain:
    """A third party's backend without the optional methods."""

    name = "toy"

    async def connect(self) -> EngineInfo:
        return EngineInfo("toy", "m", 100, "1", vocab_size=VOCAB)


async def test_a_backend_that_cannot_score_given_ids_says_so() -> None:
    plain: Any = Plain()  # without most methods of a backend
    with pytest.raises(UnsupportedByServerError, match="'toy'"):
        await score(plain, LIKELY, of=OF)


# What logprobs mean.


async def measured(engine: Any) -> EngineInfo:
    backend = in_process_backend(engine)
    return await measure(backend, await backend.connect(), np.array(PROMPT, np.int32))


MODES: dict[str, tuple[dict[str, Any], tuple[bool, bool]]] = {
    "raw": ({"raw_logprobs": True}, (False, False)),
    "with the temperature": ({"raw_logprobs": False}, (True, False)),
    "with temperature and truncation": ({"raw_logprobs": False, "truncated_logprobs": True}, (True, True)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", WIRES)
async def test_each_logprob_mode_is_distinguished(kind: Kind, mode: str) -> None:
    options, expected = MODES[mode]
    found = await measured(engine_of(kind, **options))
    assert (found.processed_logprobs, found.truncated_logprobs) == expected


async def test_a_server_that_requires_top_k_is_measured_with_a_wide_one() -> None:
    options = {"sampling_masks": True, "raw_logprobs": False, "truncated_logprobs": True}
    found = await measured(engine_of("vllm", **options))
    assert found.capabilities.sampling_mask is True
    assert (found.processed_logprobs, found.truncated_logprobs) == (True, True)


def info(processed_logprobs: bool | None, version: str | None = "9", **more: Any) -> EngineInfo:
    return EngineInfo("engine", "m", 100, version, processed_logprobs=processed_logprobs, **more)


REGEX = Grammar(kind="regex", value="x")
SOURCE = "engine 9, measured at connect"
MEANINGS: list[tuple[bool | None, dict[str, Any], tuple[float | None, bool]]] = [
    # Raw logprobs are at temperature 1 whatever was asked; a grammar still masks before them.
    (False, {}, (1.0, False)),
    (False, {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, (1.0, False)),
    (False, {"temperature": 0.0}, (1.0, False)),
    (False, {"presence_penalty": 1.0}, (1.0, True)),
    (False, {"min_new_tokens": 3}, (1.0, True)),
    (False, {"extra": {"logit_bias": {"5": 1}}}, (1.0, True)),
    (False, {"grammar": REGEX}, (1.0, True)),
    # Processed ones are at the request's; greedy is at 1.
    (True, {}, (1.0, False)),
    (True, {"temperature": 0.5}, (0.5, False)),
    (True, {"temperature": 0.0}, (1.0, False)),
    *(
        (True, {name: value}, (1.0, True))
        for name, value in {
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.1,
            "min_new_tokens": 1,
            "grammar": REGEX,
            "extra": {"own": 1},
        }.items()
    ),
    # Unknown: only where both readings agree is there a temperature.
    (None, {}, (1.0, False)),
    (None, {"temperature": 0.5}, (None, False)),
    (None, {"temperature": 0.0}, (1.0, False)),
    (None, {"top_k": 5}, (None, True)),
    (None, {"grammar": REGEX}, (None, True)),
    (None, {"min_new_tokens": 1}, (None, True)),
]


@pytest.mark.parametrize(("processed_logprobs", "sampling", "meaning"), MEANINGS)
def test_semantics_of_every_combination(
    processed_logprobs: bool | None, sampling: dict[str, Any], meaning: tuple[float | None, bool]
) -> None:
    found = semantics_of(info(processed_logprobs), SamplingParams(**sampling))
    assert found == Semantics(processed_logprobs, meaning[0], meaning[1], SOURCE)
    assert found.comparable_with_scoring() is (meaning == (1.0, False))


def test_raw_logprobs_that_are_taken_before_penalties_stay_plain() -> None:
    known = info(False, raw_before_penalties=True)
    moved = {"presence_penalty": 1.0, "min_new_tokens": 3, "extra": {"logit_bias": {"5": 1}}}
    assert semantics_of(known, SamplingParams(**moved)).adjusted is False
    assert semantics_of(known, SamplingParams(grammar=REGEX)).adjusted is True


CUT = {"top_k": 5, "top_p": 0.5, "min_p": 0.1}


@pytest.mark.parametrize(
    ("processed_logprobs", "truncated_logprobs", "adjusted"),
    [
        (True, False, False),
        (True, True, True),
        (True, None, True),
        (False, False, False),
        (False, None, False),
        (False, True, True),
        (None, False, False),
        (None, None, True),
    ],
)
@pytest.mark.parametrize("sampling", [{name: value} for name, value in CUT.items()], ids=list(CUT))
def test_truncation_adjusts_only_truncated_logprobs(
    processed_logprobs: bool | None, truncated_logprobs: bool | None, adjusted: bool, sampling: dict[str, Any]
) -> None:
    known = info(processed_logprobs, truncated_logprobs=truncated_logprobs)
    assert semantics_of(known, SamplingParams(**sampling)).adjusted is adjusted
    assert semantics_of(known, SamplingParams()).adjusted is False


def test_an_unknown_version_is_reported() -> None:
    assert semantics_of(info(False, None), SamplingParams()).source == "engine of unknown version, measured at connect"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", WIRES)
@given(
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_k=st.sampled_from([-1, 1, 3]),
    moved=st.sampled_from([{}, {"presence_penalty": 1.5}, {"extra": {"logit_bias": {"10": 5.0, "11": -5.0}}}]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=8)
def test_comparable_semantics_imply_equal_scores(
    kind: Kind, mode: str, temperature: float, top_k: int, moved: dict[str, Any], seed: int
) -> None:
    """Whenever they say that scoring gives the same number, it does."""
    options, (processed_logprobs, truncated_logprobs) = MODES[mode]

    async def run() -> None:
        backend = in_process_backend(engine_of(kind, **options))
        before = (await backend.connect()).raw_before_penalties
        known = info(processed_logprobs, truncated_logprobs=truncated_logprobs, raw_before_penalties=before)
        request = request_of(
            temperature=temperature, top_k=top_k, seed=seed, max_new_tokens=20, stop_token_ids=(EOS,), **moved
        )
        response = await generate(backend, request)
        scores = await score(backend, [*PROMPT, *response.output_ids.tolist()])
        same = np.allclose(scores[len(PROMPT) :], response.logprobs, atol=1e-5)
        assert same or not semantics_of(known, request.sampling).comparable_with_scoring()

    asyncio.run(run())
