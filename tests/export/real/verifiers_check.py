"""Rollouts as verifiers' `Trace`: its own branches are the trajectories, and stay so over its wire."""

from __future__ import annotations

import asyncio
import base64
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from verifiers.v1 import (
    Agent,
    AgentConfig,
    HarnessConfig,
    Sampling,
    SubprocessConfig,
    Task,
    TaskData,
    Trace,
    TrainClientConfig,
    WireTrace,
)

from strands_tito.export import ImagesNotSupportedError, LogprobMismatchError, samples_of
from strands_tito.export.sample import total_of
from strands_tito.export.verifiers import STOP, trace_of
from strands_tito.inspect.score import PREFIX, as_json, encoded
from support.kept_sets import sampled
from support.multiplying import ANSWER, QUESTION
from support.picture_ledgers import PAD, Patches, two_images
from support.rollout_forests import HOT, RAW, chain, grow, rollouts
from support.scripted import END, Says, engine_of, ids_of, tokenizer
from tito_conformance.testing import ScriptedServer
from tito_core.ledger import Finish, Ledger, VocabularyCheck

OPTIONS: dict[str, Any] = {"temperature": 1.0, "decode": lambda ids: " ".join(map(str, ids))}
seen = 0


def over_the_wire(trace: Any) -> Any:
    """Return a trace as verifiers' own server sends it to a trainer."""
    packed = msgpack.packb(trace.model_dump(mode="python"), use_bin_type=True, default=str)
    return WireTrace.model_validate(msgpack.unpackb(packed))


def by_last_turn(trace: Any) -> dict[int, Any]:
    """Return the branches by the turn of their last node."""
    places = {id(node): place for place, node in enumerate(trace.nodes)}
    return {places[id(branch.nodes[-1])] // 2: branch for branch in trace.branches}


def trained_once(trace: Any) -> dict[tuple[int, ...], int]:
    """Count what prime-rl trains: of a node that several branches share, the first one's."""
    taken: set[int] = set()
    counts: dict[tuple[int, ...], int] = {}
    for branch in trace.branches:
        for node in branch.nodes:
            if node.sampled and id(node) not in taken:
                taken.add(id(node))
                key = tuple(node.token_ids)
                counts[key] = counts.get(key, 0) + sum(node.mask)
    return counts


@settings(max_examples=60, deadline=None, database=None)
@given(rollouts(experts=False))
def traces_are_verifiers(ledger: Ledger) -> None:
    global seen
    made = trace_of(ledger, **OPTIONS, logprobs="as-recorded", task={"answer": "425"})
    assert isinstance(made, Trace)
    for trace in (made, over_the_wire(made)):
        branches = by_last_turn(trace)
        paths = ledger.trajectories()
        assert len(trace.branches) == len(paths)
        for path in paths:
            seen += 1
            branch = branches[path.turns[-1]]
            assert branch.token_ids == path.token_ids.tolist()
            free = np.zeros(len(path), bool)
            for segment in path.segments:
                free[segment.start : segment.stop] = segment.is_output and not ledger[segment.turn].draft.constrained
            assert branch.sampled_mask == free.tolist()
            expected = np.where(free, path.logprobs, 0)
            np.testing.assert_array_equal(np.array(branch.logprobs, np.float32), expected.astype(np.float32))
            assert len(branch.calls) == len(path.turns)
        sampled = sum(len(turn.draft.output_ids) for turn in ledger if not turn.draft.constrained)
        assert sum(trained_once(trace).values()) == sampled == sum(int(s.loss_mask.sum()) for s in samples_of(ledger))
        assert trace.num_turns == len(ledger)
        assert trace.id == ledger.uuid
        assert trace.task.data.id == ledger.header.task_id
        assert trace.task.data.answer == "425"
        last = samples_of(ledger)[0]
        assert trace.reward == (total_of(ledger) or 0.0)
        assert (trace.rewards == {}) is (total_of(ledger) is None)
        assert trace.has_error is last.ended_outside
        assert trace.stop_condition == STOP[last.termination]
        assert trace.usage.completion_tokens == sum(len(turn.draft.output_ids) for turn in ledger)
        for turn, call in zip(ledger, trace.calls, strict=True):
            assert call.usage.input_tokens == turn.draft.prompt_length
            assert call.finish_reason == (None if turn.draft.finish is Finish.ABORT else turn.draft.finish.value)


@settings(max_examples=40, deadline=None, database=None)
@given(rollouts(experts=True))
def experts_are_of_every_token(ledger: Ledger) -> None:
    trace = over_the_wire(trace_of(ledger, **OPTIONS, logprobs="as-recorded"))
    branches = by_last_turn(trace)
    for path, sample in zip(ledger.trajectories(), samples_of(ledger), strict=True):
        rows = branches[path.turns[-1]].routed_experts
        assert rows is not None
        assert rows.dtype == np.uint8
        assert sample.routed_experts is not None
        assert len(rows) == len(sample)
        np.testing.assert_array_equal(rows[:-1], sample.routed_experts[:-1])


def other_logprobs_are_refused() -> None:
    with pytest.raises(LogprobMismatchError, match="verifiers compares"):
        trace_of(chain((3, 2), semantics=HOT), **OPTIONS)
    with pytest.raises(ValueError, match="for verifiers, not 'omit'"):
        trace_of(chain((3, 2)), **OPTIONS, logprobs="omit")  # type: ignore[arg-type]
    ledger = chain((3, 2))
    grow(ledger, 0, 1, 2, semantics=HOT, constrained=True)  # a forced call is not part of the loss
    assert trace_of(ledger, **OPTIONS).branches[0].sampled_mask == [False] * 3 + [True] * 2 + [False] * 3
    assert trace_of(Ledger(), **OPTIONS).has_error


def kept_sets_are_verifiers() -> None:
    """A branch has its kept sets, over the wire too; where the trainer does not replay them, they are refused."""
    truth = sampled(3, 3, top=12, mask=True, top_k=4)
    with pytest.raises(LogprobMismatchError, match="verifiers has no place for kept sets, or does not replay them"):
        trace_of(truth.ledger, **OPTIONS)
    (branch,) = over_the_wire(trace_of(truth.ledger, **OPTIONS, replays=True)).branches
    mask = branch.kept_tokens if version("verifiers").startswith("0.3") else branch.sampling_mask
    rows = np.split(mask.ids, np.cumsum(mask.counts)[:-1])
    own = [row.tolist() for row, free in zip(rows, branch.sampled_mask, strict=True) if free]
    assert own == truth.kept
    assert sum(mask.counts) == sum(map(len, truth.kept))
    values = np.array(branch.logprobs)[np.array(branch.sampled_mask)]
    np.testing.assert_allclose(values, truth.over_kept, atol=2e-4)


def scored(ledger: Ledger) -> Ledger:
    """Add a teacher's column: token i of a turn has the logprob -i / 8."""
    semantics = as_json({"semantics": RAW, "vocabulary": VocabularyCheck.NOT_CHECKED})
    facts = {"model": "big", "weight_version": None, **semantics}
    for turn in ledger:
        values = -np.arange(turn.own_length, dtype=np.float32) / 8
        ledger.annotate(f"{PREFIX}teacher", encoded(values, facts), turn=turn.index)
    return ledger


@settings(max_examples=40, deadline=None, database=None)
@given(rollouts(experts=False))
def what_a_trainer_weighs_is_on_the_nodes(ledger: Ledger) -> None:
    """A branch has the teacher's logprobs, the advantages and the weights on the tokens that they are of."""
    given = [np.arange(len(turn.draft.output_ids)) + turn.index for turn in ledger]
    weights = {"rl": [1.0] * len(ledger), "ce": [np.full(turn.own_length, 0.5) for turn in ledger]}
    more: dict[str, Any] = {"logprobs": "as-recorded", "advantages": given, "loss_weights": weights}
    trace = over_the_wire(trace_of(scored(ledger), **OPTIONS, **more))
    for last, branch in by_last_turn(trace).items():
        free, output = np.array(branch.sampled_mask), []
        teacher, advantages = [], []
        for turn in ledger.path(last):
            spread = [0.0] * turn.draft.columns.prompt
            teacher += (-np.arange(turn.own_length) / 8).tolist()
            advantages += [*spread, *given[turn.index].tolist()]
            output += [*spread, *[1.0] * turn.draft.columns.output]
        if free.any():
            assert branch.reference_logprobs == np.where(free, teacher, 0).tolist()
            assert branch.advantages == np.where(free, advantages, 0).tolist()
        assert branch.loss_weights("rl") == output
        assert branch.loss_weights("ce") == [0.5] * len(free)


def what_cannot_be_weighed_is_refused() -> None:
    ledger = scored(chain((3, 2), (1, 2)))
    with pytest.raises(LogprobMismatchError, match=r"verifiers compares .* in column 'teacher'"):
        trace_of(scored(chain((3, 2), semantics=HOT)), temperature=0.7, decode=OPTIONS["decode"])
    for wrong in ([1.0], [1.0, [1.0, 2.0, 3.0]], [1.0, float("nan")]):
        with pytest.raises(ValueError, match=r"advantages has \d entries for 2 turns"):
            trace_of(ledger, **OPTIONS, advantages=wrong)
    partly = chain((3, 2))
    scored(partly)
    grow(partly, 0, 1, 2)
    nodes = trace_of(partly, **OPTIONS).nodes
    assert {node.reference_logprobs for node in nodes} == {None}, "a trainer would read 0 for the others"


def images_are_in_the_messages_and_their_tokens_are_marked() -> None:
    ledger = two_images()
    if version("verifiers").startswith("0.3"):
        with pytest.raises(ImagesNotSupportedError, match="verifiers before 0"):
            trace_of(ledger, **OPTIONS, logprobs="as-recorded")
    trace = over_the_wire(trace_of(ledger, **OPTIONS, logprobs="as-recorded", processor=Patches()))
    (branch,) = trace.branches
    (path,) = ledger.trajectories()
    assert branch.token_ids == path.token_ids.tolist()
    assert branch.mm_token_type_ids == [int(token == PAD) for token in branch.token_ids]
    urls = [part.image_url.url for node in branch.nodes if not node.sampled for part in node.message.content
            if part.type == "image_url"]  # fmt: skip
    assert [base64.b64decode(url.partition(",")[2]) for url in urls] == [image.data for image in path.images]
    if not version("verifiers").startswith("0.3"):
        return
    held = branch.multi_modal_data
    assert held is not None
    grids = [item["image_grid_thw"].tolist() for item in held.mm_items["image"]]
    assert grids == [[[1, 2, 8]], [[1, 2, 4]]]
    assert held.mm_hashes == {"image": [image.sha256.hex() for image in path.images]}


async def rolled_out(url: str, folder: str) -> Any:
    config = AgentConfig(
        model=folder,
        client=TrainClientConfig(base_url=f"{url}/v1"),
        harness=HarnessConfig(id="verifiers_harness"),
        sampling=Sampling(temperature=1.0, max_tokens=64),
        runtime=SubprocessConfig(),
    )
    async with Agent(config) as agent:
        return await agent.run(Task(TaskData(prompt=QUESTION)))


def the_examples_harness_plays_a_task() -> None:
    """verifiers' own agent imports and runs it, and records what was sampled."""
    sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
    with tempfile.TemporaryDirectory() as folder, ScriptedServer(engine_of("vllm", Says(*[ANSWER] * 4))) as server:
        tokenizer().save_pretrained(folder)
        trace = asyncio.run(rolled_out(server.base_url, folder))
    assert (trace.ok, trace.errors, trace.stop_condition) == (True, [], "agent_completed")
    (branch,) = trace.branches
    said = ids_of(ANSWER + END)
    assert branch.token_ids[-len(said) :] == said
    assert branch.sampled_mask == [False] * (len(branch.token_ids) - len(said)) + [True] * len(said)
    assert trace.info["tito"]["termination"] == "completed"


if __name__ == "__main__":
    images_are_in_the_messages_and_their_tokens_are_marked()
    traces_are_verifiers()
    experts_are_of_every_token()
    other_logprobs_are_refused()
    kept_sets_are_verifiers()
    what_a_trainer_weighs_is_on_the_nodes()
    what_cannot_be_weighed_is_refused()
    the_examples_harness_plays_a_task()
    print(f"verifiers: ok, {version('verifiers')}, {seen} branches")
