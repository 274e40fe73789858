"""A backend that modifies a request changes neither other requests nor the validation."""

from __future__ import annotations

import asyncio
import json
import pickle
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backend.test_raw_responses import Liar, truth
from support.backends import EOS, PROMPT, request_of
from tito_core.backend import BackendError, RawResponse, RawScores, SamplingParams
from tito_core.backend.generate import generate, score
from tito_core.backend.resume import generate_resuming


class Changer(Liar):
    """Changes what it gets, and cannot stream."""

    async def generate(self, request: Any) -> Any:
        request.sampling.extra.get("nested", {})["x"] = [2]
        request.sampling.extra["top_a"] = 0.5
        return self.raw


@pytest.mark.parametrize("extra", [{}, {"extra": {}}, {"extra": {"nested": {"x": [1]}}}])
def test_extra_fields_are_read_only_and_so_are_their_copies(extra: Any) -> None:
    request, before = request_of(**extra), json.dumps(extra.get("extra", {}))
    with pytest.raises(BackendError, match=r"raised TypeError: .*read-only"):
        asyncio.run(generate(Changer(truth()), request))
    for sampling in (request.sampling, pickle.loads(pickle.dumps(request.sampling)), deepcopy(request.sampling)):
        assert sampling == SamplingParams(**sampling.model_dump())
        assert json.dumps(sampling.extra) == before
        for change in (dict.setdefault, dict.update, dict.pop, dict.clear):
            with pytest.raises(TypeError, match="read-only"):
                getattr(sampling.extra, change.__name__)({"top_a": 1})


def test_extra_fields_are_a_copy_of_what_the_user_wrote() -> None:
    wrote: dict[str, Any] = {"nested": {"x": [1]}}
    sampling = SamplingParams(extra=wrote)
    wrote["nested"]["x"].append(2)
    assert sampling.extra == {"nested": {"x": (1,)}}


class Overwriter(Liar):
    """Writes into the ids that it gets, and says that these are what it read."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__(None)
        self.parts = parts

    async def generate(self, request: Any, on_chunk: Any = None) -> RawResponse:
        self.parts -= 1
        if not self.parts:
            request.input_ids[:] = 5
        return truth(
            finish="abort" if self.parts else "stop",
            output_ids=[21, 22, 23 if self.parts else EOS],
            logprob_ids=None,
            echoed=request.input_ids.tolist(),
            prompt_tokens=len(request.input_ids),
        )

    async def score(self, token_ids: Any) -> RawScores:
        token_ids[:] = 5
        return RawScores(logprobs=[None] + [-1.0] * (len(token_ids) - 1), token_ids=token_ids.tolist())


@pytest.mark.parametrize("parts", [1, 2])
def test_a_prompt_is_read_only(parts: int) -> None:
    """Neither a first one nor one that goes on after an abort; the caller's array stays as it is, and is its own."""
    ids = np.array(PROMPT, np.int32)
    request = replace(request_of(max_new_tokens=9), input_ids=ids)
    with pytest.raises(BackendError, match=r"raised ValueError: .*read-only"):
        asyncio.run(generate_resuming(Overwriter(parts), request))
    assert ids.tolist() == list(PROMPT)
    assert ids.flags.writeable


def test_a_scored_sequence_is_read_only() -> None:
    ids = np.array(PROMPT, np.int32)
    with pytest.raises(ValueError, match="read-only"):
        asyncio.run(score(Overwriter(), ids))
    assert ids.tolist() == list(PROMPT)
