"""Rollouts of a real engine, with tool calls and a branch, through every exporter that needs no trainer's package.

Ids, masks, logprobs and versions in what comes out are those of the ledger's trajectories, and each token that is
trained is one that the engine scores as recorded. What needs a package runs under `make trainers`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from strands.types.exceptions import MaxTokensReachedException

from strands_tito.export import TrainingSample, samples_of
from strands_tito.export.batch import packed, padded
from strands_tito.export.parquet import read_parquet, write_parquet
from strands_tito.export.slime import fields_of
from strands_tito.export.trainer import prompt_response_of, trained_turns
from strands_tito.integrations.trl import columns_of
from support import calculating
from support.real import Served
from support.scripted import tokenizer
from tito_compat.spans import emit_spans
from tito_core.backend.generate import score
from tito_core.ledger import Ledger, check_ledger
from tito_core.termination import record_termination, termination_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,  # every turn that CI samples is scored again; exporters read the same ledgers
    pytest.mark.timeout(600),
]
ROLLOUTS, PAD = 12, 0
ROUNDS = 5
"""About every second rollout samples a sound call, so twelve are enough."""


async def one(served: Served) -> Ledger:
    """Run an agent, edit its history after a tool call, and run it again."""
    model = served.model(temperature=1.0, max_new_tokens=64)
    agent = calculating.make_editing_agent(model, None)
    try:
        ended: Any = await agent.invoke_async(calculating.QUESTION, limits={"turns": 4})
    except MaxTokensReachedException as error:
        ended = error
    record_termination(model.ledger, termination_of(ended, model.ledger))
    model.ledger.annotate("reward", len(model.ledger) / 4)
    return model.ledger


@pytest.fixture(scope="module")
def ledgers(served: Served) -> list[Ledger]:
    """Rollouts; some have tool calls and two trajectories."""

    async def all_of_them() -> list[Ledger]:
        found: list[Ledger] = []
        for _ in range(ROUNDS):
            found += await asyncio.gather(*(one(served) for _ in range(ROLLOUTS)))
            if calculating.called(found) and any(len(ledger.trajectories()) > 1 for ledger in found):
                break
        return found

    found = asyncio.run(all_of_them())
    for ledger in found:
        check_ledger(ledger)
    assert calculating.called(found), "no rollout called the tool"
    assert any(len(ledger.trajectories()) > 1 for ledger in found)
    return found


@pytest.fixture(scope="module")
def samples(ledgers: list[Ledger]) -> list[TrainingSample]:
    """The samples. They are compared with the trajectories here, because all exporters use them."""
    found = [sample for ledger in ledgers for sample in samples_of(ledger)]
    paths = [path for ledger in ledgers for path in ledger.trajectories()]
    for sample, path in zip(found, paths, strict=True):
        assert sample.token_ids.tolist() == path.token_ids.tolist()
        assert sample.loss_mask.tolist() == path.loss_mask.tolist()
        np.testing.assert_array_equal(sample.logprobs, path.logprobs)
        assert sample.versions == path.versions
    sampled = sum(turn.draft.columns.output for ledger in ledgers for turn in ledger)
    assert sum(int(sample.loss_mask.sum()) for sample in found) == sampled
    return found


async def test_each_trained_token_is_scored_by_the_engine_as_recorded(
    served: Served, samples: list[TrainingSample]
) -> None:
    worst = 0.0
    for sample in samples:
        scores = await score(served.policy.backend, sample.token_ids.tolist())
        trained = sample.loss_mask.astype(bool)
        worst = max(worst, float(np.abs(scores - sample.logprobs)[trained].max()))
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    print(
        f"\n{served.kind}: {len(samples)} samples of {ROLLOUTS} rollouts, {tokens} trained tokens, max {worst:.1e} nats"
    )
    assert worst <= 1e-4


def test_parquet_round_trips(samples: list[TrainingSample], tmp_path: Path) -> None:
    assert write_parquet(tmp_path / "rollouts.parquet", samples) == len(samples)
    for before, after in zip(samples, read_parquet(tmp_path / "rollouts.parquet"), strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "provenance"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
        for name in ("identity", "versions", "semantics", "termination", "finish", "reward", "turns", "prompt_length"):
            assert getattr(before, name) == getattr(after, name)


def test_batches_hold_every_token_in_order(samples: list[TrainingSample]) -> None:
    batch = padded(samples, pad_id=PAD)
    rows = packed(samples, pad_id=PAD, length=2 * max(map(len, samples)))
    for number, (sample, place) in enumerate(zip(samples, rows.placed, strict=True)):
        trained = sample.loss_mask.astype(bool)
        for columns, at in ((batch, (number, slice(len(sample)))), (rows, (place.row, slice(place.start, place.stop)))):
            assert columns.input_ids[at].tolist() == sample.token_ids.tolist()
            assert columns.loss_mask[at].tolist() == sample.loss_mask.tolist()
            assert columns.logprobs[at][trained].tolist() == sample.logprobs[trained].tolist()
            assert columns.position_ids[at].tolist() == list(range(len(sample)))
    total = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert int(batch.loss_mask.sum()) == int(rows.loss_mask.sum()) == total


def test_prompts_and_responses_are_whole(served: Served, samples: list[TrainingSample]) -> None:
    for sample in samples:
        start, trained = sample.prompt_length, sample.response_mask.astype(bool)
        flat = prompt_response_of(sample, trainer="a trainer", temperature=1.0)
        fields = fields_of(sample, decode=tokenizer().decode, temperature=1.0)
        assert flat.prompt_ids + flat.response_ids == fields["tokens"] == sample.token_ids.tolist()
        assert flat.mask == fields["loss_mask"] == sample.response_mask.tolist()
        for logprobs in (flat.logprobs, fields["rollout_log_probs"]):
            assert logprobs is not None
            assert np.array(logprobs, np.float32)[trained].tolist() == sample.logprobs[start:][trained].tolist()
            assert not np.array(logprobs)[~trained].any()
        assert fields["response"] == tokenizer().decode(sample.response_ids.tolist())
        versions = {span.version for span in sample.versions} - {None}
        assert set(fields["weight_versions"]) <= versions


def test_trls_columns_are_the_last_paths(ledgers: list[Ledger]) -> None:
    found = columns_of(ledgers, temperature=1.0, end_id=2, branches="last")
    for row, ledger in enumerate(ledgers):
        last = ledger.path_ids(len(ledger) - 1).tolist()
        assert found["prompt_ids"][row] + found["completion_ids"][row] == last
        outputs = sum(turn.draft.columns.output for turn in ledger.path(len(ledger) - 1))
        assert sum(found["env_mask"][row]) == outputs
        assert found["rollout_reward"][row] == len(ledger) / 4


def test_spans_and_turns_hold_each_turn_once(ledgers: list[Ledger]) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for ledger in ledgers:
        exporter.clear()
        assert emit_spans(ledger, provider.get_tracer("test"), temperature=1.0) == len(ledger)
        turns = list(trained_turns(ledger, trainer="a trainer", temperature=1.0))
        assert sorted(each.turn.index for each in turns) == list(range(len(ledger)))
        for span, each in zip(exporter.get_finished_spans(), turns, strict=True):
            attributes, draft = dict(span.attributes or {}), each.turn.draft
            assert list(attributes["prompt_token_ids"]) == each.prompt_ids.tolist()
            assert list(attributes["response_token_ids"]) == draft.output_ids.tolist()
            logprobs = [entry["logprob"] for entry in json.loads(str(attributes["logprobs.content"]))]
            assert logprobs == draft.logprobs.tolist()
            assert ledger.path_ids(each.turn.index).tolist() == [*each.prompt_ids, *draft.output_ids]
