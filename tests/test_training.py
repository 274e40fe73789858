"""The parts of `examples/train_tiny.py` that need no engine and no torch: task, batch, order of an update."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.progress import Progress

from calculator import evaluate
from strands_tito.inspect.teacher import Teacher
from support.scripted import BACKENDS, Says, backend_of, call, engine_of, ids_of, policy_of, tokenizer
from tito_conformance.testing import HashPolicy
from tito_core import Ledger, Policy
from tito_core.ledger import check_ledger
from train_tiny import DISTIL, LORA, Settings, Training, parse_arguments
from training import batch, curves
from training.process import LearnerProcess
from training.task import Problem, attempt, problems, reward_of

SUM = Problem("What is 25 * 17?", 425)
GOOD = (call("calculator", '{"expression": "25 * 17"}'), "The answer is 425.")
END = ids_of("<|im_end|>")
SPLIT = [*ids_of("The"), *ids_of(" an"), *ids_of("swer"), *ids_of(" is 425."), *END]
"""Tokens that the tokenizer would not produce for this text."""


def scripted(kind: str, *answers: Any) -> Policy:
    return replace(policy_of(kind), backend=backend_of(engine_of(kind, Says(*answers)), kind))


def with_reward(reward: float, group: str) -> Ledger:
    ledger = Ledger(group_id=group)
    ledger.annotate("reward", reward)
    return ledger


def test_answers_are_those_of_the_calculator_and_a_seed_gives_the_same_problems() -> None:
    for problem in problems(50, seed=3):
        expression = "".join(letter for letter in problem.question if letter in "0123456789+-*")
        assert evaluate(expression.rstrip("-")) == problem.answer
    assert problems(5, seed=1) == problems(5, seed=1) != problems(5, seed=2)


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (GOOD, 1.0),
        ((GOOD[0], "It is 425"), 1.0),
        ((GOOD[0], "I do not know."), 0.5),
        ((GOOD[0], "It is 4255."), 0.5),
        ((GOOD[0], "It is 425 and " * 30 + "..."), 0.5),
        ((call("calculator", '{"expression": "25 + 17"}'), "The answer is 425."), 0.25),
        ((call("calculator", '{"expression": "25 ^ 17"}'), "The answer is 425."), 0.0),
        ((call("calculator", '{"expression": "25 * 17"}}'),), 0.0),
        (("The answer is 425.",), 0.0),
    ],
)
@pytest.mark.filterwarnings("ignore")
async def test_the_reward_is_for_a_call_its_result_and_the_final_answer(
    answers: tuple[str, ...], reward: float
) -> None:
    ledger = await attempt(scripted("vllm", *answers), SUM, "a")
    assert ledger.annotation("reward") == reward
    assert ledger.header.group_id == "a"
    check_ledger(ledger)


def test_no_words_no_reward() -> None:
    assert reward_of([{"role": "user", "content": [{"text": "What is 25 * 17?"}]}], 425) == 0.0


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from([0, 0.25, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=4))
def test_advantages_compare_a_group_with_itself(groups: list[list[float]]) -> None:
    ledgers = [with_reward(reward, str(number)) for number, group in enumerate(groups) for reward in group]
    found = iter(batch.advantages(ledgers))
    for group in groups:
        mine = [next(found) for _ in group]
        assert abs(sum(mine)) < 1e-6
        assert np.argsort(group, kind="stable").tolist() == np.argsort(mine, kind="stable").tolist()
        assert any(mine) == (len(set(group)) > 1)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_rows_are_the_ledgers_and_retokenizing_changes_other_spellings(kind: str, tmp_path: Path) -> None:
    ledgers = [await attempt(scripted(kind, GOOD[0], last), SUM, "a") for last in (GOOD[1], SPLIT, "Who knows?")]
    rows = batch.rows_of(ledgers)
    again = batch.retokenized(ledgers, policy_of(kind).tokenizer)
    assert batch.changed(rows, again) == 1
    for row, other, ledger in zip(rows, again, ledgers, strict=True):
        (trajectory,) = ledger.trajectories()
        assert row.ids.tolist() == trajectory.token_ids.tolist()
        assert len(other.ids) == len(other.mask) == len(other.logprobs)
        assert np.isfinite(other.logprobs[other.mask]).all()
    assert len(rows[1].ids) == len(again[1].ids) + 1
    assert rows[1].mask.sum() == again[1].mask.sum() + 1
    with np.load(batch.write(rows, tmp_path / "batch.npz")) as file:
        assert np.array_equal(file["logprobs"][file["mask"]], batch.trained(rows, "logprobs"))
        assert file["tokens"].shape == file["mask"].shape == (3, max(len(row.ids) for row in rows))
        advantages = np.array(batch.advantages(ledgers), np.float32)[:, None]
        assert np.allclose(file["advantages"], np.where(file["mask"], advantages, 0))


class Noted:
    """Records the order of the loop's calls; replaces the learner and the engine's loader."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def ask(self, do: str, **order: str) -> dict[str, Any]:
        self.done.append(" ".join([do, *(Path(value).name for value in order.values())]))
        if "into" in order:
            with np.load(order["batch"]) as file:
                np.save(order["into"], file["logprobs"][file["mask"]])
        return {"passes": [{"ratio": [1.0, 1.0, 1.0], "clipped": 0.0}], "kl": 0.0, "apart": [0.0] * 3, "norm": 0.0}


@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_update_samples_learns_saves_and_then_loads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    policy = scripted(kind, *GOOD)
    training = Training(policy, Noted(done), tmp_path, Settings(updates=2, questions=1, copies=2, held_out=0))  # type: ignore[arg-type]

    async def load(path: str, version: str) -> None:
        done.append(f"load {Path(path).name} {version}")

    monkeypatch.setattr(training, "admin", type("Admin", (), {"load_weights": staticmethod(load)}))
    monkeypatch.setattr(training.admin, "weight_version", lambda: policy.backend.weight_version(), raising=False)  # type: ignore[attr-defined]
    with Progress(disable=True) as progress:
        run = await training.train(progress)
    assert done == [
        *["score batch.npz scores.npy"] * 3,
        "update batch.npz scores.npy",
        "save weights-0",
        "load weights-0 step-1",
        "score batch.npz scores.npy",
        "update batch.npz scores.npy",
        "save weights-1",
        "load weights-1 step-2",
    ]
    assert [update["samples"] for update in run.updates] == [2, 2]
    assert run.proof["ours"] == {"tokens": run.updates[0]["sampled"], "max": 0.0, "p99": 0.0, "ratio": [1.0] * 3}
    assert json.loads(json.dumps(run.updates)) == run.updates
    assert "0 of 4 (0%)" in curves.table({kind: {**vars_of(run), "before": 0.0, "after": 0.0}})


async def test_each_lora_update_is_an_adapter_of_a_new_name_that_samples_next(tmp_path: Path) -> None:
    done: list[str] = []
    engine = engine_of("vllm", Says(*GOOD), adapters=())
    policy = replace(policy_of("vllm"), backend=backend_of(engine, "vllm"))
    training = Training(policy, Noted(done), tmp_path, replace(LORA, updates=3, questions=1, copies=2, held_out=1))  # type: ignore[arg-type]
    with Progress(disable=True) as progress:
        run = await training.train(progress)
    adapters = [version.partition("+")[2] for update in run.updates for version in update["sampled_by"]]
    assert adapters == ["", "step-1", "step-2"]
    assert engine.state.adapters == {"step-3": str(tmp_path / "weights-0")}
    assert [order for order in done if order.startswith("save")] == [
        "save weights-0",
        "save weights-1",
        "save weights-0",
    ]
    assert (run.name, run.engine.endswith(", LoRA")) == ("vllm, LoRA", True)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_teachers_scores_of_the_recorded_ids_are_what_is_learned(kind: str, tmp_path: Path) -> None:
    """The teacher is another distribution on the other engine; its own logprobs need no server."""
    other = next(name for name in BACKENDS if name != kind)
    words = HashPolicy(len(tokenizer()), alphabet=range(40, 2000), eos_ids=[int(tokenizer().eos_token_id)])
    teacher = await Teacher.connect(backend=backend_of(engine_of(other, words), other), tokenizer=tokenizer())
    done: list[str] = []
    settings = replace(DISTIL, updates=1, questions=1, copies=1, held_out=2)
    training = Training(scripted(kind, *GOOD), Noted(done), tmp_path, settings, teacher)  # type: ignore[arg-type]
    ledgers = [await attempt(scripted(kind, *GOOD), SUM, "a") for _ in range(2)]
    rows = await training._rows(ledgers)
    for row in rows:
        expected = np.array(words.score(row.ids.tolist(), 0, 1.0)[1:], np.float64)
        assert np.allclose((row.advantages + row.logprobs)[1:][row.mask[1:]], expected[row.mask[1:]], atol=1e-4)
    apart = np.concatenate([-row.advantages[row.mask] for row in rows])
    assert batch.reverse_kl(rows) == pytest.approx(float(apart.mean()))
    run = training.run
    assert run.engine == f"{kind} {training.policy.info.version}, taught by {other} {teacher.info.version}"


async def test_a_distillation_records_the_reverse_kl_of_batches_and_of_held_out_questions(tmp_path: Path) -> None:
    policy = scripted("vllm", *GOOD)
    same = await Teacher.connect(backend=backend_of(engine_of("vllm", Says(*GOOD)), "vllm"), tokenizer=tokenizer())
    settings = replace(DISTIL, updates=2, questions=1, copies=1, held_out=1)
    training = Training(policy, Noted([]), tmp_path, settings, same)  # type: ignore[arg-type]
    with Progress(disable=True) as progress:
        run = await training.train(progress)
    figures = [update["reverse_kl"] for update in run.updates]
    assert len(figures) == len(run.reverse_kl) == 2
    mean = f"{sum(figures) / 2:.3f}"
    shown = curves.table({run.name: vars_of(run)})
    assert f"| reverse KL to the teacher, first and last three updates | {mean}, **{mean}** |" in shown


def test_figures_are_kept_short_and_say_the_same_and_a_merge_can_take_each_run() -> None:
    runs = {name: {"updates": [{"kl": 1 / 3e12, "ratio": [1 - 1 / 3e5, 2 / 3, 7]}], "x": name} for name in ("b", "a")}
    text = curves._short(runs)
    assert [line[:5] for line in text.splitlines()[1:-1]] == ['"a":{', '"b":{']
    kept = json.loads(text)["b"]["updates"][0]
    assert [kept["kl"], *kept["ratio"]] == pytest.approx([1 / 3e12, 1 - 1 / 3e5, 2 / 3, 7], rel=6e-8, abs=0)
    assert len(text) < 0.8 * len(json.dumps(runs))


def test_figures_of_retokenized_text_are_of_no_place_in_the_answer(tmp_path: Path) -> None:
    np.save(tmp_path / "scores.npy", np.zeros(2))
    columns = ([4, 5, 6], [False, True, True], [0, -1, -1], [0, 0, 0], [0, 0, 1], [0, 1, 2])
    row = batch.Row(*map(np.array, columns))
    ours, theirs = (batch.mismatch([row], tmp_path / "scores.npy", **shown) for shown in ({}, {"shown": ()}))
    assert set(ours) - set(theirs) == {"by_turn", "by_position"}
    assert ours["by_turn"] == {str(turn): [1, *(theirs[name] for name in list(theirs)[1:])] for turn in (0, 1)}


@pytest.mark.parametrize("flags", [["--lora", "--backend", "sglang"], ["--lora", "--distil"]])
def test_kinds_of_runs_that_do_not_exist_are_refused_before_anything_starts(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", *flags])
    with pytest.raises(SystemExit) as ended:
        parse_arguments()
    assert ended.value.code == 2
    assert "--lora" in capsys.readouterr().err.splitlines()[-1]


def test_the_error_of_a_learner_that_ended_has_its_last_lines(tmp_path: Path) -> None:
    with (
        LearnerProcess(Path(sys.executable), tmp_path / "no model", {}, tmp_path / "log") as learner,
        pytest.raises(RuntimeError, match=r"status 1 during 'save':\n(.*\n)*.*Error"),
    ):
        learner.ask("save", folder=str(tmp_path))


def vars_of(run: Any) -> dict[str, Any]:
    return {name: getattr(run, name) for name in run.__slots__}
