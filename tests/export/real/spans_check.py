"""Spans through Agent Lightning 0.3: its own `Span`, and the adapter that makes triplets of them."""

from __future__ import annotations

from importlib.metadata import version

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.types import Span, Triplet
from hypothesis import given, settings
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from strands_tito.export.trainer import trained_turns
from support.rollout_forests import rollouts
from tito_compat.spans import emit_spans
from tito_core.ledger import Ledger

seen = 0


@settings(max_examples=30, deadline=None, database=None)
@given(rollouts())
def spans_become_triplets(ledger: Ledger) -> None:
    global seen
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("rollout"):
        emit_spans(ledger, tracer, temperature=1.0, logprobs="as-recorded")
    spans = [
        Span.from_opentelemetry(span, rollout_id=ledger.uuid, attempt_id="0", sequence_id=number)
        for number, span in enumerate(exporter.get_finished_spans())
    ]
    found = TracerTraceToTriplet().adapt(spans)
    expected = list(trained_turns(ledger, trainer="X", temperature=1.0, logprobs="as-recorded"))
    assert len(found) == len(expected)
    for triplet, each in zip(found, expected, strict=True):
        seen += 1
        assert isinstance(triplet, Triplet)
        assert triplet.prompt["token_ids"] == each.prompt_ids.tolist()
        assert triplet.response["token_ids"] == each.turn.draft.output_ids.tolist()
        scores = [entry["logprob"] for entry in triplet.response["logprobs"]]
        assert scores == each.turn.draft.logprobs.tolist()


if __name__ == "__main__":
    spans_become_triplets()
    print(f"agentlightning: ok, {version('agentlightning')}, {seen} triplets")
