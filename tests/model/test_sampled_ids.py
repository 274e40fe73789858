"""Ids that the server refuses in a prompt are not committed; ids of a padded embedding are (law 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent

from support.scripted import BACKENDS, END, Says, backend_of, engine_of, ids_of, policy_of, tokenizer
from tito_conformance.testing import Fault, at
from tito_core import TITOModel
from tito_core.backend import BadRequestError, ProtocolViolationError

PADDED = 64
"""Number of embedding rows past the tokenizer's ids."""


def samples(token: int) -> Callable[[Any], None]:
    """Replace the first id of an answer."""

    def edit(answer: Any) -> None:
        if "choices" in answer:
            choice = answer["choices"][0]
            choice["token_ids"][0] = token
            choice["logprobs"]["content"][0]["token_id"] = token
        else:
            answer["output_ids"][0] = token
            answer["meta_info"]["output_token_logprobs"][0][1] = token

    return edit


def model_on(kind: str, script: Any, vocab_size: int, **options: Any) -> TITOModel:
    """Make a model on an engine with this many embedding rows; only SGLang reports the number."""
    backend = backend_of(engine_of(kind, script, vocab_size=vocab_size, **options), kind)
    shared = policy_of(kind)
    info = replace(shared.info, vocab_size=vocab_size if kind == "sglang" else None, reports_versions=False)
    return replace(shared, backend=backend, info=info).model()


@pytest.mark.parametrize("kind", BACKENDS)
@given(token=st.integers(0, 2 * PADDED))
@settings(max_examples=8, deadline=None)
def test_ids_of_a_padded_embedding_are_committed_exactly_when_the_server_accepts_them(kind: str, token: int) -> None:
    size = len(tokenizer())
    answer = [size + token, *ids_of("One." + END)]
    fault = at({0: Fault(edit=samples(size + token))})
    model = model_on(kind, Says([0, *answer[1:]], "Two."), size + PADDED, fault=fault)
    agent = Agent(model=model, callback_handler=None)
    if token < PADDED:
        agent("Hello?")
        assert model.trajectory.token_ids[-len(answer) :].tolist() == answer
        agent("And?")
        assert len(model.trajectories) == 1
    else:
        with pytest.raises(ProtocolViolationError):
            agent("Hello?")
        assert len(model.ledger) == 0


def test_a_committed_id_that_another_server_refuses_names_the_remedy() -> None:
    size = len(tokenizer())
    answer = [size + 1, *ids_of("One." + END)]
    padded = model_on("vllm", Says(answer), size + PADDED)
    agent = Agent(model=padded, callback_handler=None)
    agent("Hello?")
    agent.model = TITOModel.of(model_on("vllm", Says("Two."), size).policy, padded.ledger)
    with pytest.raises(BadRequestError, match=r"del agent\.messages\[n:\]"):
        agent("And?")
    del agent.messages[:]
    agent("And now?")
    assert len(padded.ledger) == 2
