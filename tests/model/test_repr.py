"""`repr` of a policy, a model, a ledger and a trajectory: one line of facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strands import Agent

from support.rollout_forests import rollouts
from support.scripted import Says, backend_of, engine_of, model_of, policy_of, tokenizer
from tito_core.ledger import Ledger
from tito_core.model import Policy, TITOModel
from tito_sglang import SGLangModel

TEXT = st.text(st.characters(codec="utf-8"), max_size=400)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_policy_and_a_model_name_their_server_and_the_rollout(kind: str) -> None:
    model = model_of(kind, Says("Yes."))
    Agent(model=model, callback_handler=None)("Is it?")
    policy = repr(model.policy)
    info = model.policy.info
    assert policy.startswith(f"<Policy {kind} {info.version}, model 'scripted', tokenizer '")
    assert policy.endswith(", parser 'hermes'>")
    assert repr(model) == f"<TITOModel {kind} {info.version}, model 'scripted': {model.ledger!r}>"
    assert "1 turn, 1 leaf" in repr(model)
    assert str(len(model.trajectory)) in repr(model.trajectory)


@settings(max_examples=30)
@given(TEXT, st.one_of(st.none(), TEXT))
def test_whatever_a_server_reports_it_is_one_short_line(name: str, version: str | None) -> None:
    policy = policy_of("vllm")
    shown = repr(TITOModel.of(replace(policy, info=replace(policy.info, model=name, version=version))))
    assert shown.isprintable()
    assert len(shown) < 800


@settings(max_examples=30)
@given(rollouts())
def test_a_ledger_and_its_trajectories_are_one_line_without_arrays(ledger: Ledger) -> None:
    for shown in (repr(ledger), *map(repr, ledger.trajectories())):
        assert shown.isprintable()
        assert len(shown) < 200
        assert "[" not in shown
    assert f": {len(ledger)} turn" in repr(ledger)


def test_a_model_that_is_not_connected_says_so_and_stays_so() -> None:
    model = SGLangModel(tokenizer(), base_url="http://localhost:1")
    assert repr(model) == "<SGLangModel: not connected>"
    assert not model.is_connected


def stages_of(kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool) -> str:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    engine = engine_of(kind, Says("Yes."))
    Policy.connect(backend=backend_of(engine, kind), tokenizer=tokenizer())
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_connecting_prints_its_stages_on_a_terminal_only(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = stages_of(kind, monkeypatch, capsys, True).splitlines()
    assert len(stages) == 5
    assert stages[0].startswith("tokenizer=<")
    assert stages[-1].startswith("measuring ")
    assert stages_of(kind, monkeypatch, capsys, False) == ""


def test_stages_that_logging_shows_are_not_printed_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "tito_core.policy"):
        assert stages_of("vllm", monkeypatch, capsys, True) == ""
    assert len([record for record in caplog.records if record.name == "tito_core.policy"]) == 5
