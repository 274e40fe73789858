"""Turn by turn: each trained turn once, with its whole prompt; as spans, and under `make trainers` in real packages."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from strands_tito.export import LogprobMismatchError
from strands_tito.export.batch import trained_turns
from support.rollout_forests import HOT, chain, rollouts
from support.trainer_packages import run
from tito_compat.spans import emit_spans
from tito_core.ledger import Ledger


@settings(max_examples=25)
@given(rollouts(), st.booleans())
def test_each_turn_comes_once_with_its_prompt_and_after_its_parent(ledger: Ledger, constrained: bool) -> None:
    found = list(
        trained_turns(ledger, trainer="X", temperature=1.0, logprobs="as-recorded", train_constrained=constrained)
    )
    expected = [turn.index for turn in ledger if constrained or not turn.draft.constrained]
    assert Counter(each.turn.index for each in found) == Counter(expected)
    seen: set[int] = set()
    for each in found:
        parent = each.turn.parent
        if parent is not None and (constrained or not ledger[parent].draft.constrained):
            assert parent in seen
        seen.add(each.turn.index)
        whole = [*each.prompt_ids.tolist(), *each.turn.draft.output_ids.tolist()]
        assert whole == ledger.path_ids(each.turn.index).tolist()


@settings(max_examples=25)
@given(rollouts())
def test_spans_hold_the_ids_by_the_names_that_are_read(ledger: Ledger) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    count = emit_spans(ledger, provider.get_tracer("test"), temperature=1.0, logprobs="as-recorded")
    spans = exporter.get_finished_spans()
    turns = list(trained_turns(ledger, trainer="X", temperature=1.0, logprobs="as-recorded"))
    assert count == len(spans) == len(turns)
    for span, each in zip(spans, turns, strict=True):
        attributes = dict(span.attributes or {})
        prompt, output = tuple(each.prompt_ids.tolist()), tuple(each.turn.draft.output_ids.tolist())
        assert span.name == "openai.chat.completion"
        assert attributes["prompt_token_ids"] == attributes["llm.hosted_vllm.prompt_token_ids"] == prompt
        assert attributes["response_token_ids"] == attributes["llm.hosted_vllm.response_token_ids"] == output
        assert (attributes["llm.token_count.prompt"], attributes["llm.token_count.completion"]) == (
            len(prompt),
            len(output),
        )
        scores = [entry["logprob"] for entry in json.loads(str(attributes["logprobs.content"]))]
        assert scores == each.turn.draft.logprobs.tolist()


def test_other_logprobs_are_refused_or_left_out_of_spans() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with pytest.raises(LogprobMismatchError, match="the reader of the spans compares"):
        emit_spans(chain((3, 2), semantics=HOT), tracer, temperature=1.0)
    assert emit_spans(chain((3, 2), semantics=HOT), tracer, temperature=1.0, logprobs="omit") == 1
    (span,) = exporter.get_finished_spans()
    assert "logprobs.content" not in (span.attributes or {})


@pytest.mark.trainers
@pytest.mark.parametrize("version", ["1.0.0", "1.0.2"])
def test_agent_lightning_makes_triplets_and_a_batch(version: str) -> None:
    output = run("agent_lightning_check.py", f"agentlightning-{version}")
    assert f"agentlightning: ok, {version}, " in output.splitlines()[-1]


@pytest.mark.trainers
def test_agent_lightnings_older_adapter_makes_triplets_of_spans() -> None:
    output = run("spans_check.py", "agentlightning-0.3.0")
    assert "agentlightning: ok, 0.3.0, " in output.splitlines()[-1]


@pytest.mark.trainers
@pytest.mark.parametrize("version", ["0.30.0", "0.38.0"])
def test_tinkers_own_types_take_them(version: str) -> None:
    output = run("tinker_check.py", f"tinker-{version}")
    assert f"tinker: ok, {version}, " in output.splitlines()[-1]
