"""The oracle alone: a turn that equals its answer has no problem, and each difference breaks the check for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tito_conformance import oracle
from tito_conformance.oracle import OracleTrajectory, OracleTurn
from tito_conformance.wire import WireGeneration

END = 9
TURN = OracleTurn(
    index=0,
    parent=None,
    delta_ids=[1, 2, 3],
    provenance=[0, 0, 0],
    output_ids=[4, 5, END],
    logprobs=[-1.0, -0.5, -0.25],
    finish="stop",
    stop=END,
    request_id="r",
    cached_tokens=2,
    versions=[(0, 3, "v")],
    constrained=False,
    max_new_tokens=8,
)
ANSWER = WireGeneration(
    request_id="r",
    prompt_ids=[1, 2, 3],
    sampling={"max_tokens": 8},
    echoed_ids=[1, 2, 3],
    output_ids=[4, 5, END],
    logprobs=[-1.0, -0.5, -0.25],
    logprob_ids=[4, 5, END],
    finish="stop",
    stop=END,
    prompt_tokens=3,
    completion_tokens=3,
    cached_tokens=2,
    versions=[(0, 3, "v")],
)
SHORTER: dict[str, Any] = {"output_ids": [4, 5], "logprobs": [-1.0, -0.5], "versions": [(0, 2, "v")]}


def problems(turn: dict[str, Any], answer: dict[str, Any]) -> list[Any]:
    return list(oracle.compare([replace(TURN, **turn)], [replace(ANSWER, **answer)], [END]))


def test_a_turn_that_equals_its_answer_has_no_problem() -> None:
    assert problems({}, {}) == []
    assert problems({"versions": [(0, 3, None)]}, {"versions": None}) == []
    assert problems({"cached_tokens": None}, {"cached_tokens": None}) == []
    assert problems({}, {"prompt_tokens": None, "completion_tokens": None}) == []
    assert problems({"stop": " a"}, {"sampling": {"max_tokens": 8, "stop": [" a"]}}) == []


@pytest.mark.parametrize(
    ("turn", "answer", "check", "position"),
    [
        ({"request_id": "other"}, {}, "answers", None),
        ({"delta_ids": [1, 2, 7]}, {"echoed_ids": [1, 2, 7]}, "prompt", None),
        ({}, {"echoed_ids": None}, "echo", None),
        ({}, {"echoed_ids": [1, 2]}, "echo", None),
        ({"output_ids": [4, 6, END]}, {}, "output", 1),
        ({}, {"logprob_ids": [4, 5, 4]}, "logprobs", 2),
        ({"logprobs": [-1.0, -0.6, -0.25]}, {}, "logprobs", 1),
        ({"logprobs": [-1.0, 0.1, -0.25]}, {"logprobs": [-1.0, 0.1, -0.25]}, "logprobs", 1),
        ({"logprobs": [-1.0, -0.5, -9999.0]}, {"logprobs": [-1.0, -0.5, -9999.0]}, "logprobs", 2),
        ({"logprobs": [-math.inf, -0.5, -0.25]}, {"logprobs": [-math.inf, -0.5, -0.25]}, "logprobs", 0),
        ({}, {"prompt_tokens": 4}, "usage", None),
        ({}, {"completion_tokens": 2}, "usage", None),
        ({"cached_tokens": 1}, {}, "cached", None),
        ({"cached_tokens": None}, {}, "cached", None),
        ({"cached_tokens": 3}, {"cached_tokens": 3}, "cached", None),
        ({"cached_tokens": -1}, {"cached_tokens": -1}, "cached", None),
        ({"versions": [(0, 3, "w")]}, {}, "versions", None),
        ({"versions": [(0, 2, "v")]}, {"versions": [(0, 2, "v")]}, "versions", None),
        ({"versions": [(1, 3, "v")]}, {"versions": [(1, 3, "v")]}, "versions", None),
        ({"finish": "length"}, {}, "finish", None),
        ({"finish": "length"}, {"finish": "length"}, "finish", None),
        ({"finish": "length", "stop": None}, {"finish": "length", "sampling": {"max_tokens": 3}}, "finish", 2),
        ({"stop": None}, {}, "finish", None),
        ({"stop": 5}, {}, "finish", None),
        ({"stop": None, **SHORTER}, {**SHORTER, "logprob_ids": [4, 5], "completion_tokens": 2}, "finish", 1),
        ({}, {"sampling": {"max_tokens": 2}}, "finish", None),
        ({}, {"sampling": {"max_tokens": 8, "stop_token_ids": [5]}}, "finish", 1),
    ],
)
def test_each_difference_is_a_problem(
    turn: dict[str, Any], answer: dict[str, Any], check: str, position: int | None
) -> None:
    found = problems(turn, answer)
    assert {each[0] for each in found} == {check}
    assert found[0][2:] == ((0,) if position is None else (0, position))


def test_an_end_that_is_ignored_or_too_early_for_the_request_does_not_end_an_answer() -> None:
    for sampling in ({"ignore_eos": True}, {"min_tokens": 2}, {"min_new_tokens": 2}):
        assert problems({}, {"sampling": {"max_tokens": 8, "stop_token_ids": [5], **sampling}}) == []


PATH = OracleTrajectory([1, 2, 3, 4, 5, END], [0, 0, 0, 1, 1, 1], [math.nan] * 3 + [-1.0, -0.5, -0.25], [0])


@pytest.mark.parametrize(
    ("trajectories", "constrained", "check"),
    [
        ([PATH], False, None),
        ([replace(PATH, mask=[0] * 6)], True, None),
        ([PATH], True, "mask"),
        ([replace(PATH, ids=[1, 2, 3, 4, 5, 6])], False, "trajectory"),
        ([replace(PATH, mask=[0, 0, 1, 1, 1, 1])], False, "mask"),
        ([replace(PATH, mask=[0, 0, 0, 0, 1, 1])], False, "mask"),
        ([PATH, PATH], False, "mask"),
        ([], False, "mask"),
        ([replace(PATH, logprobs=[math.nan, math.nan, -1.0, -1.0, -0.5, -0.25])], False, "alignment"),
        ([replace(PATH, logprobs=[math.nan] * 3 + [-0.5, -1.0, -0.25])], False, "alignment"),
    ],
)
def test_a_trajectory_is_its_turns(trajectories: list[OracleTrajectory], constrained: bool, check: str | None) -> None:
    found = list(oracle.check_trajectories([replace(TURN, constrained=constrained)], trajectories))
    assert (found[0][0] if found else None) == check
    assert all(index == 0 for _, _, index in found)
