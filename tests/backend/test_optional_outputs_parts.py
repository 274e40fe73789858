"""Columns of streamed and resumed answers equal those of one response."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import PROMPT, WIRES, Kind, engine_of, hash_policy, in_process_backend, request_of
from tito_conformance.testing import Completion, ScriptedRequest
from tito_core.backend import OptionalOutputs, TokenResponse, generate_resuming, resume
from tito_core.backend.generate import generate
from tito_core.ledger import Column
from tito_core.ledger.turn import Finish

LAYERS, EXPERTS = 3, 2
WHOLE = tuple(range(20, 30))
START = 3
"""Where the delta begins in the prompt."""


def wanted_on(kind: Kind, **changes: Any) -> OptionalOutputs:
    return OptionalOutputs.of(
        {"top_logprobs": 3, "prompt_logprobs": True, "routed_experts": (LAYERS, EXPERTS), **changes}
    )


@dataclass
class Cut:
    """The policy's distribution, but always the same ids, aborted after so many of them, run by run."""

    cuts: list[int]
    runs: int = 0
    policy: Any = field(default_factory=hash_policy)

    def __call__(self, request: ScriptedRequest) -> Completion:
        left = WHOLE[len(request.prompt_ids) - len(PROMPT) :]
        cut = self.cuts[self.runs] if self.runs < len(self.cuts) else None
        self.runs += 1
        return Completion(left, finish="length") if cut is None else Completion(left[:cut], finish="abort")

    def score(self, ids: Any, start: int, temperature: float) -> Any:
        return self.policy.score(ids, start, temperature)

    def top(self, ids: Any, position: int, k: int, temperature: float) -> Any:
        return self.policy.top(ids, position, k, temperature)


def ask(
    kind: Kind, cuts: list[int], *, stream: bool = False, optional_outputs: OptionalOutputs | None = None
) -> TokenResponse:
    engine = engine_of(kind, Cut(cuts), experts=(LAYERS, EXPERTS), sampling_masks=kind == "vllm")
    request = request_of(max_new_tokens=len(WHOLE), stop_token_ids=(), top_k=4 if kind == "vllm" else -1)
    request = replace(
        request, optional_outputs=optional_outputs or wanted_on(kind, sampling_mask=kind == "vllm"), delta_start=START
    )
    on_chunk = (lambda _: None) if stream else None
    return asyncio.run(generate_resuming(in_process_backend(engine), request, on_chunk=on_chunk))


def facts(columns: Mapping[str, Column]) -> Any:
    return {name: (c.start, c.shape, c.values.tolist()) for name, c in columns.items()}


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_FIRST_WAIT_S", 0.0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", WIRES)
def test_columns_of_parts_are_columns_of_the_whole(kind: Kind, stream: bool) -> None:
    whole = ask(kind, [])
    assert {"top_ids", "top_logprobs", "prompt_logprobs", "routed_experts"} <= set(whole.columns)

    @settings(deadline=None, max_examples=5)
    @given(st.lists(st.integers(0, 4), max_size=4))
    def holds(cuts: list[int]) -> None:
        while sum(cuts) >= len(WHOLE):
            cuts.pop()
        response = ask(kind, cuts, stream=stream)
        assert response.finish == Finish.LENGTH
        assert response.logprobs.tolist() == whole.logprobs.tolist()
        assert facts(response.columns) == facts(whole.columns)

    holds()


@pytest.mark.parametrize("kind", WIRES)
def test_outputs_that_can_be_streamed_are_streamed(kind: Kind) -> None:
    optional_outputs = wanted_on(
        kind, prompt_logprobs=False, routed_experts=kind != "vllm-completions" and (LAYERS, EXPERTS)
    )
    engine = engine_of(kind, Cut([]), experts=(LAYERS, EXPERTS))
    chunks: list[Any] = []
    request = replace(
        request_of(max_new_tokens=len(WHOLE), stop_token_ids=()), optional_outputs=optional_outputs, delta_start=START
    )
    response = asyncio.run(generate(in_process_backend(engine), request, chunks.append))
    assert len(chunks) > 5
    assert facts(response.columns) == facts(ask(kind, [], optional_outputs=optional_outputs).columns)
