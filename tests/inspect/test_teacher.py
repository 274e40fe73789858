"""Columns of another model's logprobs: aligned with the teacher's own distribution, resumable, and refused if wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from strands_tito.export import samples_of
from strands_tito.export.parquet import read_parquet, write_parquet
from strands_tito.export.slime import fields_of
from strands_tito.export.trainer import LogprobMismatchError
from strands_tito.inspect.score import PREFIX, recorded, scores_of
from strands_tito.inspect.teacher import Teacher
from support import vision
from support.drafts import make_draft
from support.rollout_forests import chain, grow, rollouts
from support.scripted import BACKENDS, backend_of, engine_of, tokenizer
from support.typed import tito
from tito_conformance.testing import HashPolicy, scripted_server
from tito_core import store
from tito_core.backend import BackendError, EngineInfo, ProtocolViolationError, RawScores, UnsupportedByServerError
from tito_core.backend.values import InvalidValueError
from tito_core.ledger import LawViolationError, Ledger, Semantics, VocabularyCheck, check_ledger
from tito_core.ledger.turn import Header
from tito_core.termination import Termination, record_termination

ANSWER = Callable[[list[float | None], list[int]], dict[str, Any]]


def distribution() -> HashPolicy:
    return HashPolicy(len(tokenizer()), alphabet=range(40, 2000), eos_ids=[int(tokenizer().eos_token_id)])


def expected(ids: Any) -> np.ndarray:
    """Return the logprobs of a sequence straight from the distribution, without a server."""
    values = np.array(distribution().score([int(token) for token in ids], 0, 1.0), np.float32)
    values[0] = np.nan
    return values


@dataclass
class Toy:
    """A teacher's server in this process that may answer otherwise; it counts its requests."""

    answer: ANSWER = lambda logprobs, ids: {"logprobs": logprobs, "token_ids": ids}
    model: str = "big"
    context: int = 4096
    together: asyncio.Barrier | None = None
    requests: int = 0
    running: int = 0
    most: int = 0
    name = "toy"

    async def connect(self) -> EngineInfo:
        return EngineInfo("toy", self.model, self.context, "7", vocab_size=len(tokenizer()))

    async def score(self, token_ids: Any) -> RawScores:
        self.requests += 1
        self.running += 1
        self.most = max(self.most, self.running)
        if self.together is not None:
            await self.together.wait()
        self.running -= 1
        return RawScores(**self.answer([None, *expected(token_ids).tolist()[1:]], token_ids.tolist()))

    async def generate(self, request: Any, on_chunk: Any = None) -> Any:
        raise AssertionError("a teacher samples nothing")

    async def tokenize(self, text: str) -> None:
        return None

    async def abort(self, request_id: str) -> None: ...

    async def aclose(self) -> None: ...


async def teacher_at(server: Any) -> Teacher:
    return await Teacher.connect(backend=server, tokenizer=tokenizer())


def branched() -> Ledger:
    """Return a ledger with a shared turn, two branches, and a root of its own."""
    ledger = Ledger()
    root = grow(ledger, None, 5, 3)
    grow(ledger, grow(ledger, root, 2, 4), 1, 2)
    grow(ledger, root, 3, 1)
    grow(ledger, None, 2, 2)
    record_termination(ledger, Termination.COMPLETED)
    return ledger


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=10)
@given(ledger=rollouts())
def test_a_column_is_the_teachers_own_distribution_at_the_same_places(kind: str, ledger: Ledger) -> None:
    async def annotated() -> None:
        engine = engine_of(kind, distribution())
        teacher = await teacher_at(backend_of(engine, kind))
        before = len(engine.requests)
        assert await teacher.annotate(ledger, "big") == []
        assert len(engine.requests) - before <= len(ledger.trajectories)
        for trajectory in ledger.trajectories:
            again = await teacher.score(trajectory)
            column = scores_of(ledger, trajectory.path)["big"]
            for found in (again, column):
                assert (found.logprobs.dtype, found.logprobs.shape) == (np.float32, (len(trajectory),))
                np.testing.assert_allclose(found.logprobs, expected(trajectory.token_ids), atol=1e-5)
            assert column.semantics == again.semantics
            assert (column.semantics.processed, column.semantics.temperature) == (False, 1.0)
            assert column.semantics.source.startswith(kind)
        requests = len(engine.requests)
        notes = len(ledger.annotations)
        assert await teacher.annotate(ledger, "big") == []
        assert (len(engine.requests), len(ledger.annotations)) == (requests, notes), "nothing was missing"

    asyncio.run(annotated())
    check_ledger(ledger)
    assert {turn.index for turn in ledger} == set(recorded(ledger)["big"])


async def test_a_killed_run_goes_on_and_the_file_equals_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """A kill at a write leaves a prefix of the appended bytes, as a file is only appended to."""
    path = tmp_path / "rollouts.tito"
    store.append(path, [branched(), chain((4, 2), (1, 3))])
    start, teacher = path.stat().st_size, await teacher_at(Toy())
    await teacher.annotate_file(path, concurrency=1)
    whole = path.read_bytes()
    assert len([note for ledger in store.read(path) for note in ledger.annotations if PREFIX in note.name]) == 7
    for cut in [start, *range(start + 1, len(whole), 97), len(whole) - 1, len(whole)]:
        path.write_bytes(whole[:cut])
        await teacher.annotate_file(path, concurrency=1)
        assert path.read_bytes() == whole, cut


async def test_rollouts_are_scored_together_and_no_more_than_asked_for(tmp_path: Path) -> None:
    path, server = tmp_path / "rollouts.tito", Toy()
    store.append(path, [chain((3, 2)) for _ in range(12)])
    teacher = await teacher_at(server)
    server.together = asyncio.Barrier(4)
    await teacher.annotate_file(path, concurrency=4)
    assert (server.requests, server.most) == (12, 4)


def rolled(logprobs: list[float | None], ids: list[int]) -> dict[str, Any]:
    return {"logprobs": [None, *logprobs[2:], -1.0], "token_ids": [*ids[1:], ids[0]]}


DEFECTS: dict[str, ANSWER] = {
    "scores of another request, by id": lambda logprobs, ids: {
        "logprobs": logprobs, "token_ids": ids, "request_id": "ours", "response_id": "another"
    },
    "scores of another request, by tokens": lambda logprobs, ids: {"logprobs": logprobs, "token_ids": ids[::-1]},
    "shifted by one": rolled,
    "shifted by one, without ids": lambda logprobs, ids: {"logprobs": [*logprobs[1:], -1.0]},
    "too few": lambda logprobs, ids: {"logprobs": logprobs[:-1], "token_ids": ids[:-1]},
    "too few, without ids": lambda logprobs, ids: {"logprobs": logprobs[1:]},
    "no logprob in the middle": lambda logprobs, ids: {"logprobs": [*logprobs[:2], None, *logprobs[3:]]},
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
async def test_scores_of_something_else_are_refused_and_nothing_is_written(tmp_path: Path, defect: str) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [branched()])
    before = path.read_bytes()
    with pytest.raises(ProtocolViolationError, match=r"Law 4|another"):
        await (await teacher_at(Toy(DEFECTS[defect]))).annotate_file(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_teacher_with_another_vocabulary_is_refused(kind: str) -> None:
    other = vision.tokenizer()
    engine = engine_of(kind, distribution(), encode=lambda text, special: other.encode(text, add_special_tokens=False))
    with pytest.raises(LawViolationError, match="Law 15"):
        await teacher_at(backend_of(engine, kind))


async def test_rollouts_of_another_tokenizer_are_refused_and_unknown_ones_say_so(tmp_path: Path) -> None:
    teacher, path = await teacher_at(Toy()), tmp_path / "rollouts.tito"
    own = teacher.bound.template.certificate.tokenizer
    for named, known in ((own, True), ("f" * 64, False)):
        ledger = Ledger(tokenizer="x", certificate=MappingProxyType({"tokenizer": named}))
        grow(ledger, None, 3, 2)
        if known:
            await teacher.annotate(ledger)
            assert scores_of(ledger, ledger.path(0))["teacher"].vocabulary is VocabularyCheck.VOCAB_SIZE
        else:
            store.append(path, [ledger])
            before = path.read_bytes()
            with pytest.raises(LawViolationError, match=r"Law 15: rollout .* was recorded with the tokenizer 'x'"):
                await teacher.annotate_file(path)
            assert path.read_bytes() == before
    await teacher.annotate(plain := chain((3, 2)))
    assert scores_of(plain, plain.path(0))["teacher"].vocabulary is VocabularyCheck.NOT_CHECKED
    assert isinstance(plain.header, Header)


async def test_a_column_is_of_one_model() -> None:
    await (await teacher_at(Toy())).annotate(ledger := branched())
    notes = ledger.annotations
    other = await teacher_at(Toy(model="bigger"))
    with pytest.raises(InvalidValueError, match=r"Law 11: column 'teacher' of turn 0 .* another name"):
        await other.annotate(ledger)
    assert ledger.annotations == notes
    await other.annotate(ledger, "second")
    assert {name: each.model for name, each in scores_of(ledger, ledger.path(2)).items()} == {
        "teacher": "big",
        "second": "bigger",
    }


async def test_another_models_teacher_writes_nothing_into_a_file_that_has_a_part_of_the_column(tmp_path: Path) -> None:
    """A run that was killed has scored rollouts anywhere in the file."""
    path = tmp_path / "rollouts.tito"
    store.append(path, [chain((3, 2)) for _ in range(4)])
    with store.LedgerFile(path, "a") as file:
        await (await teacher_at(Toy())).annotate(file.resume(file.uuids[2]))
    before = path.read_bytes()
    with pytest.raises(InvalidValueError, match=r"Law 11: column 'teacher' .* another name"):
        await (await teacher_at(Toy(model="bigger"))).annotate_file(path, concurrency=1)
    assert path.read_bytes() == before


async def test_a_path_that_is_too_long_is_named_and_the_others_are_scored() -> None:
    ledger = branched()
    (refused,) = await (await teacher_at(Toy(context=16))).annotate(ledger)
    assert refused.startswith(f"Rollout {ledger.uuid}, path to turn 2: The prompt has 17 tokens")
    assert set(recorded(ledger)["teacher"]) == {0, 3, 4}
    assert [set(sample.scores) for sample in samples_of(ledger)] == [set(), {"teacher"}, {"teacher"}]


async def test_a_sampled_id_that_the_teacher_lacks_leaves_out_its_path_alone() -> None:
    """A model can have more rows than its tokenizer has ids, and sample them."""
    ledger, last = branched(), len(tokenizer())
    ledger.commit(make_draft(None, 0, [1, 2], [5, last]))
    (refused,) = await (await teacher_at(Toy())).annotate(ledger)
    assert refused.endswith(f"path to turn 5: it holds the id {last}, and the server's vocabulary has {last} ids.")
    assert set(recorded(ledger)["teacher"]) == {0, 1, 2, 3, 4}
    engine = engine_of("vllm", distribution())  # it does not tell its size, and refuses the id
    (refused,) = await (await teacher_at(backend_of(engine, "vllm"))).annotate(ledger, "second")
    assert f"path to turn 5: vllm at http://scripted/v1/completions answered 400: Token id {last} is out of" in refused
    assert set(recorded(ledger)["second"]) == {0, 1, 2, 3, 4}


async def test_a_score_that_rounding_puts_above_0_can_be_read() -> None:
    rounded = Toy(lambda logprobs, ids: {"logprobs": [None, 5e-6, *logprobs[2:]]})
    await (await teacher_at(rounded)).annotate(ledger := chain((3, 2)))
    assert scores_of(ledger, ledger.path(0))["teacher"].logprobs[1] == np.float32(5e-6)


@pytest.mark.parametrize("changed", ["model", "weights"])
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_server_that_was_replaced_between_two_paths_is_refused(kind: str, changed: str) -> None:
    """SGLang's requests name no model, and another one scores as if nothing had happened."""
    engine = engine_of(kind, distribution())
    backend: Any = backend_of(engine, kind)
    teacher = await teacher_at(backend)
    await teacher.annotate(chain((3, 2)))
    backend.http.interruptions += 1
    if changed == "model":
        engine.state.model = engine.wire.state.model = "another"
    else:
        engine.state.set_version("step-9")
    ledger = chain((3, 2))
    with pytest.raises(BackendError, match=r"another|weight version is 'step-9', no longer 'default'"):
        await teacher.annotate(ledger)
    assert not ledger.annotations


async def test_pictures_are_scored_and_their_placeholders_have_no_logprob() -> None:
    engine = vision.VisionEngine()
    model = (await vision.policy_of(engine)).model()
    content = [vision.image(vision.png(8, 8, 1)), {"text": "?"}]
    async for _ in model.stream([{"role": "user", "content": content}]):
        pass
    teacher = await Teacher.connect(backend=engine, tokenizer=vision.tokenizer())
    assert await teacher.annotate(model.ledger) == []
    (trajectory,) = model.ledger.trajectories
    found = scores_of(model.ledger, trajectory.path)["teacher"].logprobs
    np.testing.assert_allclose(found[trajectory.loss_mask == 1], trajectory.logprobs[trajectory.loss_mask == 1])
    inside = np.zeros(len(trajectory), bool)
    for span in trajectory.media:
        inside[span.offset : span.offset + span.length] = True
    assert inside.sum() == 5
    inside[0] = True
    assert np.array_equal(np.isnan(found), inside)


class WithoutImages(Toy):
    async def connect(self) -> EngineInfo:
        return replace(await super().connect(), vocab_size=len(vision.tokenizer()))


async def test_a_teacher_of_text_names_a_path_with_a_picture_and_scores_the_others() -> None:
    model = (await vision.policy_of(vision.VisionEngine())).model()
    for content in ([vision.image(vision.png(8, 8, 1)), {"text": "?"}], [{"text": "Hi"}]):
        async for _ in model.stream([{"role": "user", "content": content}]):
            pass
    teacher = await Teacher.connect(backend=WithoutImages(), tokenizer=vision.tokenizer())
    (refused,) = await teacher.annotate(model.ledger)
    assert "path to turn 0: The prompt has 1 images, and this toy server takes none" in refused
    assert set(recorded(model.ledger)["teacher"]) == {1}


@settings(max_examples=10)
@given(ledger=rollouts())
def test_exports_hold_the_column(tmp_path_factory: pytest.TempPathFactory, ledger: Ledger) -> None:
    asyncio.run(_annotate(ledger))
    samples = samples_of(ledger)
    path = tmp_path_factory.mktemp("parquet") / "samples.parquet"
    write_parquet(path, samples)
    for sample, read in zip(samples, read_parquet(path), strict=True):
        ours, theirs = sample.scores["teacher"], read.scores["teacher"]
        np.testing.assert_array_equal(theirs.logprobs, ours.logprobs)
        assert theirs.logprobs.dtype == np.float32
        assert (theirs.model, theirs.weight_version, theirs.vocabulary) == ("big", None, VocabularyCheck.NOT_CHECKED)
        assert theirs.semantics == ours.semantics == Semantics(False, 1.0, False, "toy 7, scored")
        fields = fields_of(sample, decode=str, temperature=1.0, logprobs="omit")
        values = fields["teacher_log_probs"]
        assert len(values) == fields["response_length"]
        np.testing.assert_allclose(values, expected(sample.token_ids)[sample.prompt_length :], atol=1e-6)
        assert fields_of(sample, decode=str, temperature=1.0, logprobs="omit", teacher="x")["teacher_log_probs"] is None
        with pytest.raises(
            LogprobMismatchError, match=r"Law 11: slime .* in column 'teacher' \(teacher='' leaves it out\)"
        ):
            fields_of(sample, decode=str, temperature=0.7, logprobs="omit")


async def _annotate(ledger: Ledger) -> None:
    await (await teacher_at(Toy())).annotate(ledger)


@pytest.mark.parametrize("value", ["?", {"logprobs": "AAAA"}, {"logprobs": "?"}, {}, 1, None])
async def test_a_damaged_column_is_refused_when_it_is_read(value: Any) -> None:
    await _annotate(ledger := chain((3, 2)))
    ledger.annotate(PREFIX + "teacher", value, turn=0)
    with pytest.raises(LawViolationError, match="the scores 'teacher' of turn 0"):
        samples_of(ledger)
    with pytest.raises(LawViolationError, match=r"the scores 'teacher' of turn 0 .* another name"):
        await _annotate(ledger)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_given_ids_are_scored_beside_the_tokens_and_recorded_nowhere(kind: str) -> None:
    teacher = await teacher_at(backend_of(engine_of(kind, distribution(), model_runner=2), kind))
    ledger, of = branched(), [int(tokenizer().eos_token_id), 100]
    notes = ledger.annotations
    for trajectory in ledger.trajectories:
        found, plain = await teacher.score(trajectory, token_ids=of), await teacher.score(trajectory)
        assert found.matrix is not None
        assert found.token_ids is not None
        np.testing.assert_array_equal(found.logprobs, plain.logprobs)
        assert (plain.token_ids, plain.matrix, found.semantics) == (None, None, plain.semantics)
        assert (found.token_ids.tolist(), found.matrix.dtype) == (of, np.float32)
        ids = trajectory.token_ids.tolist()
        for at in range(1, len(ids)):
            own = [distribution().score([*ids[:at], token], at, 1.0)[0] for token in of]
            np.testing.assert_allclose(found.matrix[at], own, rtol=1e-5)
        assert np.isnan(found.matrix[0]).all()
        assert found.matrix.shape == (len(ids), 2)
    assert ledger.annotations == notes


async def test_a_teacher_that_cannot_score_given_ids_says_so() -> None:
    with pytest.raises(UnsupportedByServerError, match="2 given ids cannot be scored by 'toy'"):
        await (await teacher_at(Toy())).score(chain((3, 2)).trajectories[0], token_ids=[1, 2])


@pytest.mark.parametrize("kind", BACKENDS)
def test_the_command_adds_a_column_and_a_second_run_changes_nothing(kind: str, tmp_path: Path) -> None:
    path, whole = tmp_path / "rollouts.tito", {"vocab_size": len(tokenizer()), "max_model_len": 4096}
    store.append(path, [branched(), chain((3, 2))])
    encode = lambda text, special: tokenizer().encode(text, add_special_tokens=special)  # noqa: E731
    with scripted_server(kind, distribution(), eos_ids=[tokenizer().eos_token_id], encode=encode, **whole) as server:
        asked = ["score", str(path), "--backend", kind, "--base-url", server.base_url, "--tokenizer", "smollm2"]
        asked[-1] = tokenizer().name_or_path
        first = tito(*asked, "--column", "big")
        assert (first.exit_code, "2 rollouts scored, column 'big'" in first.output) == (0, True), first.output
        once = path.read_bytes()
        assert tito(*asked, "--column", "big").exit_code == 0
        assert path.read_bytes() == once
    room = 22 if kind == "sglang" else 16  # SGLang wants six tokens free
    with scripted_server(kind, distribution(), encode=encode, **{**whole, "max_model_len": room}) as server:
        asked[5] = server.base_url
        short = tito(*asked, "--column", "short")
        assert (short.exit_code, "scored, column" in short.output) == (1, False)
        assert "2 rollouts read; paths without column 'short': 1" in short.output
    for ledger in store.read(path):
        for trajectory in ledger.trajectories:
            found = scores_of(ledger, trajectory.path)["big"].logprobs
            np.testing.assert_allclose(found, expected(trajectory.token_ids), atol=1e-5)
