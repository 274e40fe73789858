"""A third party's backend is checked as ours are, although no reader knows its wire."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from support.scripted import tokenizer
from tito_conformance import suite
from tito_conformance.checks import PROFILES, Profile
from tito_conformance.connection import connect
from tito_conformance.report import did_not_apply, rows
from tito_conformance.target import Target
from tito_core.backend.registry import ENTRY_POINT_GROUP

pytestmark = pytest.mark.suite

HERE = Path(__file__).parent
Lie = Callable[[dict[str, Any]], None]


BACKEND = EntryPoint("toy", "toy_backend:ToyBackend", ENTRY_POINT_GROUP)
WIRE = EntryPoint("toy", "toy_wire:KIT", "tito.wires")


def install(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    monkeypatch.syspath_prepend(str(HERE / "toy"))
    monkeypatch.setattr("tito_core.entry_points.entry_points", lambda group: [p for p in points if p.group == group])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy backend, found by its entry point."""
    install(monkeypatch, BACKEND)


@pytest.fixture
def run(installed: None) -> Callable[[Lie | None, Profile], suite.Outcome]:
    from toy_server import ToyServer, serving

    def play(lie: Lie | None, profile: Profile) -> suite.Outcome:
        loaded = tokenizer()
        with serving(ToyServer(loaded, loaded.eos_token_id, lie=lie)) as url:
            return suite.run(Target("toy", url, loaded), profile, shrink=False)

    return play


def test_prompts_ids_logprobs_and_counts_are_checked_without_a_wire_reader(run: Any) -> None:
    outcome = run(None, PROFILES["quick"])
    assert outcome.sound, (str(outcome.broken), outcome.error)
    passed = outcome.tally.passed
    names = ("answers", "prompt", "logprobs", "finish", "lost", "rescored")
    assert all(passed[name] >= 8 for name in names), passed
    assert outcome.server.recorder.read is None
    assert outcome.server.recorder.raw == [], "checked responses are dropped"
    skipped = set(did_not_apply(rows(outcome)))
    assert {"text", "routed", "changed"} <= skipped
    assert any("does not support grammars" in why for why in outcome.tally.not_applicable["constrained"])
    assert not {"prompt", "answers", "logprobs"} & skipped


def set_to(name: str, change: Callable[[Any], Any]) -> Lie:
    def lie(answer: dict[str, Any]) -> None:
        answer[name] = change(answer[name])

    return lie


async def test_a_wire_that_is_installed_and_not_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, BACKEND, WIRE)
    from toy_server import ToyServer, serving

    loaded = tokenizer()
    with serving(ToyServer(loaded, loaded.eos_token_id)) as url:
        server = await connect(Target("toy", url, loaded))
    [note] = server.tally.notes
    assert "takes no http_transport" in note


def test_a_server_that_does_not_name_its_stops_is_sound(run: Any) -> None:
    """The suite's own requests complete the stop as turns do; vLLM up to 0.31 names none either."""
    outcome = run(set_to("stop", lambda stop: None), SHORT)
    assert outcome.sound, (str(outcome.broken), outcome.error)


SOUND_ANSWERS = 30
"""Answers before the first lie, so that those at connect are sound."""
SHORT = Profile("short", 6, 6, 2)
LIES: dict[str, Lie] = {
    "another prompt": set_to("read", lambda ids: [*ids[:-1], ids[-1] + 1]),
    "a truncated prompt": set_to("read", lambda ids: ids[1:]),
    "no echo": set_to("read", lambda ids: None),
    "a longer prompt count": set_to("prompt_tokens", lambda count: count + 1),
    "a shorter completion count": set_to("completion_tokens", lambda count: count - 1),
    "a float count": set_to("completion_tokens", float),
    "a logprob is positive": set_to("logprobs", lambda values: [0.5, *values[1:]]),
    "a logprob is missing": set_to("logprobs", lambda values: [None, *values[1:]]),
    "logprobs are text": set_to("logprobs", lambda values: list(map(str, values))),
    "a logprob is cut": set_to("logprobs", lambda values: values[:-1]),
    "an id is negative": set_to("ids", lambda ids: [-1, *ids[1:]]),
    "an id is past the vocabulary": set_to("ids", lambda ids: [10_000_000, *ids[1:]]),
    "an id is a fraction": set_to("ids", lambda ids: [ids[0] + 0.5, *ids[1:]]),
    "too many tokens": lambda answer: answer.update(
        ids=[*answer["ids"], 5] * 10, logprobs=[*answer["logprobs"], -1.0] * 10
    ),
    "an unknown finish reason": set_to("why", lambda why: "tired"),
    "length instead of stop": set_to("why", lambda why: "length"),
    "another stop token": set_to("stop", lambda stop: 7),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_of_its_server_breaks_a_law(run: Any, lie: Lie) -> None:
    answers = 0

    def late(answer: dict[str, Any]) -> None:
        nonlocal answers
        answers += 1
        if answers > SOUND_ANSWERS:
            lie(answer)

    outcome = run(late, SHORT)
    assert outcome.broken is not None, outcome.error
    assert outcome.broken.check.law in (2, 4)
