"""Resumed generations: the next request, and the joined responses."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.backends import EOS, PROMPT, engine_of, in_process_backend, request_of
from tito_core.backend import (
    BackendError,
    GenerationAbortedError,
    OptionalOutputs,
    ProtocolViolationError,
    generate_resuming,
    resume,
)
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import NO_COLUMNS, EngineInfo, TokenResponse
from tito_core.backend.resume import continuing, joined, resumable
from tito_core.ledger.columns import Column
from tito_core.ledger.turn import Adapter, Finish, ResponseSpan, VersionSpan

pytestmark = pytest.mark.usefixtures("unchecked")


def part(ids: list[int], number: int = 0, **changes: Any) -> TokenResponse:
    fields: dict[str, Any] = {
        "output_ids": np.array(ids, np.int32),
        "logprobs": np.array([-1.0 - number] * len(ids), np.float32),
        "finish": Finish.ABORT,
        "stop": None,
        "prompt_length": len(PROMPT) + number,
        "cached_tokens": number,
        "latency_s": 0.5,
        "request_id": f"r{number}",
        "versions": (VersionSpan(0, len(ids), None),),
        "message": f"aborted {number}",
    }
    return TokenResponse(**{**fields, **changes})


def test_sampling_masks_of_different_widths_are_joined() -> None:
    """A part's mask may be wider than `top_k`, where tokens are tied."""
    narrow, wide = Column.of(0, np.array([[5, 6]])), Column.of(1, np.array([[7, 8, 9]]))
    for first, second, rows in ((narrow, wide, [[5, 6, -1], [7, 8, 9]]), (wide, narrow, [[7, 8, 9], [5, 6, -1]])):
        parts = [
            part([at], columns={"sampling_mask": replace(column, start=at)})
            for at, column in enumerate((first, second))
        ]
        assert joined(parts).columns["sampling_mask"].values.tolist() == rows


def test_experts_that_begin_after_a_gap_are_joined_with_nothing_before_it() -> None:
    """As where the second part was retracted for new weights, which computed the rows before again."""
    rows = np.arange(13).reshape(13, 1, 1)
    first = part([1, 2, 3, 4], columns={"routed_experts": Column.of(0, rows[:8])})
    for start, begins in ((7, 0), (8, 0), (9, 9), (10, 10), (13, 13)):
        second = part([5, 6, 7, 8, 9], columns={"routed_experts": Column.of(start, rows[start:])})
        column = joined([first, second]).columns["routed_experts"]
        assert (column.start, column.values.tolist()) == (begins, rows[begins:].tolist())


def test_likely_tokens_of_different_widths_are_joined() -> None:
    """No filler can be taken for a token or a logprob."""
    wide = {"top_ids": Column.of(0, np.array([[5, 6]])), "top_logprobs": Column.of(0, np.array([[-1.0, -2.0]]))}
    narrow = {"top_ids": Column.of(1, np.array([[7]])), "top_logprobs": Column.of(1, np.array([[-3.0]]))}
    columns = joined([part([0], columns=wide), part([1], columns=narrow)]).columns
    assert columns["top_ids"].values.tolist() == [[5, 6], [7, -1]]
    logprobs = columns["top_logprobs"].values
    assert logprobs.dtype == np.float32
    np.testing.assert_array_equal(logprobs, [[-1.0, -2.0], [-3.0, np.nan]])


@given(
    parts=st.lists(st.lists(st.integers(3, 99), max_size=3), min_size=1, max_size=4),
    least=st.integers(0, 12),
    seed=st.none() | st.sampled_from([-(2**63), -1, 0, 5, 2**63 - 2, 2**63 - 1]),
    number=st.integers(1, 9),
    kept=st.booleans(),
)
def test_the_next_request_samples_the_missing_tokens(
    parts: list[list[int]], least: int, seed: int | None, number: int, kept: bool
) -> None:
    request = request_of(max_new_tokens=20, min_new_tokens=least, seed=seed, temperature=0.5)
    optional_outputs = OptionalOutputs(prompt_logprobs=True, top_logprobs=2)
    request = replace(
        request,
        optional_outputs=optional_outputs,
        id_text=IdText.of(request.input_ids) if kept else None,
        session_id="s",
        adapter=Adapter("one"),
    )
    there = list(itertools.chain(*parts))
    following = continuing(request, [part(ids) for ids in parts], number)
    assert following.input_ids.tolist() == [*PROMPT, *there]
    assert following.input_ids.dtype == np.int32
    assert not following.input_ids.flags.writeable
    assert (following.request_id, following.session_id, following.adapter) == (f"r-part{number}", "s", Adapter("one"))
    assert following.sampling.max_new_tokens == 20 - len(there)
    assert following.sampling.min_new_tokens == max(0, least - len(there))
    if seed is None:
        assert following.sampling.seed is None
    else:
        top = 2**63 - 1  # past which it begins again from below
        assert following.sampling.seed == (seed + number if seed + number <= top else seed + number - 2**64)
    rest = {"max_new_tokens", "min_new_tokens", "seed"}
    assert following.sampling.model_dump(exclude=rest) == request.sampling.model_dump(exclude=rest)
    if kept:
        assert following.id_text is not None
        assert following.id_text.matches(following.input_ids)
    else:
        assert following.id_text is None
    # a prompt's logprobs came with its first tokens
    assert following.optional_outputs == (optional_outputs.model_copy(update={"prompt_logprobs": not there}))
    assert following.delta_start == request.delta_start


def test_one_response_is_unchanged() -> None:
    alone = part([1, 2])
    assert joined([alone]) is alone


@given(
    parts=st.lists(st.lists(st.sampled_from("ab"), max_size=3), min_size=2, max_size=4),
)
def test_joined_responses_keep_their_values(parts: list[list[str]]) -> None:
    """Each token keeps the weight version of its own response."""
    responses = []
    for number, versions in enumerate(parts):
        spans = tuple(VersionSpan(at, at + 1, version) for at, version in enumerate(versions))
        responses.append(part([number] * len(versions), number, versions=spans or (VersionSpan(0, 0, None),)))
    responses[-1] = replace(responses[-1], finish=Finish.STOP, stop=EOS, message=None)
    whole = joined(responses)
    tokens = list(itertools.chain(*parts))
    assert whole.output_ids.tolist() == [n for n, versions in enumerate(parts) for _ in versions]
    assert whole.logprobs.tolist() == [-1.0 - n for n, versions in enumerate(parts) for _ in versions]
    assert (whole.finish, whole.stop, whole.message) == (Finish.STOP, EOS, None)
    assert (whole.prompt_length, whole.latency_s) == (len(PROMPT), 0.5 * len(parts))
    assert whole.request_id == f"r{len(parts) - 1}"
    assert [v for span in whole.versions for v in [span.version] * (span.stop - span.start)] == (tokens or [])
    assert all(one.version != other.version for one, other in itertools.pairwise(whole.versions))
    assert all(one.stop == other.start for one, other in itertools.pairwise(whole.versions))
    gave = [number for number, versions in enumerate(parts) if versions]
    assert whole.cached_tokens == (gave[0] if gave else len(parts) - 1)
    if len(gave) > 1:
        edges = [0, *itertools.accumulate(len(parts[number]) for number in gave)]
        assert whole.responses == tuple(
            ResponseSpan(start, stop, f"r{number}")
            for number, (start, stop) in zip(gave, itertools.pairwise(edges), strict=True)
        )
    else:
        assert whole.responses == ()


def column(start: int, *values: int) -> Column:
    return Column.of(start, np.array(values, np.int32).reshape(-1, 1, 1))


def test_columns_of_parts_are_concatenated() -> None:
    # the token that was sampled last of a part is routed only with the next one
    first = part([20, 21], columns={"routed_experts": column(4, 1, 2), "only": column(5, 9)})
    second = part([22], 1, columns={"routed_experts": column(6, 3, 4), "new": column(0, 5)})
    third = part([23], 2, columns={"routed_experts": column(5, 7, 7, 7, 7)})
    whole = joined([first, second, third])
    found = whole.columns["routed_experts"]
    assert (found.start, found.values.ravel().tolist()) == (4, [1, 2, 3, 4, 7])
    assert whole.columns["only"].values.ravel().tolist() == [9]
    assert set(whole.columns) == {"routed_experts", "only"}, "what the first did not bring begins nowhere"
    assert joined([part([1]), part([2], 1)]).columns is NO_COLUMNS


@pytest.mark.parametrize(
    ("sampling", "can"),
    [
        ({}, True),
        ({"stop": ("x",)}, False),
        ({"extra": {"stop_regex": "x"}}, False),
        ({"grammar": {"kind": "regex", "value": "a"}}, False),
    ],
)
def test_resumable_parameters(sampling: dict[str, Any], can: bool) -> None:
    assert resumable(request_of(**sampling).sampling) is can


class Parts:
    """A backend that gives so many tokens of each try and aborts it; the last it finishes."""

    name = "fake"

    def __init__(self, *tokens: int, finishes: bool = True) -> None:
        self.tokens, self.finishes = list(tokens), finishes
        self.asked: list[tuple[str, Any]] = []

    async def connect(self) -> EngineInfo:
        return EngineInfo("fake", "m", None, "1", vocab_size=None)

    async def generate(self, request: Any, *watcher: Any) -> TokenResponse:
        self.asked.append((request.request_id, watcher))
        last = self.finishes and len(self.tokens) == 1
        ids = [len(self.asked)] * self.tokens.pop(0)
        finish = {"finish": Finish.STOP, "message": None} if last else {}
        return part(ids, len(self.asked) - 1, request_id=request.request_id, **finish)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits in between, which take no time."""
    seconds: list[float] = []

    async def sleep(given: float) -> None:
        seconds.append(given)

    monkeypatch.setattr(resume.asyncio, "sleep", sleep)
    return seconds


async def test_on_chunk_is_passed_on_only_if_given(waits: list[float]) -> None:
    watcher: list[Any] = []
    for watches, expected in ((None, ()), (watcher.append, (watcher.append,))):
        backend: Any = Parts(1, 1)
        response = await generate_resuming(backend, request_of(), on_chunk=watches)
        assert backend.asked == [("r", expected), ("r-part1", expected)]
        assert response.output_ids.tolist() == [1, 2]
    assert waits == [0, 0]


async def test_waits_after_empty_parts_grow_and_the_last_has_none(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "MAX_RESUMES", 10)
    backend: Any = Parts(*[0] * 8, 1, 0, 0, finishes=False)
    with pytest.raises(GenerationAbortedError):
        await generate_resuming(backend, request_of(max_new_tokens=32), "resume")
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 0, 0.1])
    assert len(backend.asked) == 11


def failure_after(monkeypatch: pytest.MonkeyPatch, parts: list[Any], *, streamed: bool) -> BackendError:
    """Resume until the last of `parts`, which may be an error; return the error."""
    answers = iter(parts)

    async def answer(*_: object) -> TokenResponse:
        if isinstance(each := next(answers), Exception):
            raise each
        return each

    monkeypatch.setattr(resume, "generate", answer)
    monkeypatch.setattr(resume, "_FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(resume, "MAX_RESUMES", 2)
    backend = in_process_backend(engine_of("vllm"))
    on_chunk = (lambda chunk: None) if streamed else None
    with pytest.raises(BackendError) as caught:
        asyncio.run(generate_resuming(backend, request_of(max_new_tokens=9), "resume", on_chunk))
    assert next(answers, None) is None
    return caught.value


def rows(start: int, *shape: int) -> dict[str, Column]:
    return {"routed_experts": Column.of(start, np.ones(shape, np.int32))}


@pytest.mark.parametrize(
    ("first", "second"), [((2, 4), (1, 8)), ((2, 1, 2), (1, 2, 2)), ((2, 4), (1, 2, 2)), ((1, 2, 2), (0, 4))]
)
@pytest.mark.parametrize("streamed", [False, True])
def test_routed_experts_of_another_shape_are_refused(
    first: tuple[int, ...], second: tuple[int, ...], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No index of an expert can be a filler."""
    parts = [part([20, 21], columns=rows(0, *first)), part([22], 1, columns=rows(2, *second))]
    if not second[0]:  # no rows, no shape
        parts.append(part([23], 2, columns=rows(1, 1, 4)))
    error = failure_after(monkeypatch, parts, streamed=streamed)
    assert isinstance(error, ProtocolViolationError)
    assert all(str(shape) in str(error) for shape in (first[1:], parts[-1].columns["routed_experts"].shape))
