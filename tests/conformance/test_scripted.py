"""The suite over scripted engines: silent where nothing is wrong, and it notices every planted defect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from conformance.defects import all_defects
from conformance.defects.answer_views import View
from conformance.defects.column_views import EXPERTS
from conformance.defects.defect import SERVERS, SOUND, Defect, planted
from conformance.defects.parity import PARITY
from conformance.defects.trial import tried
from strands_tito.conformance import suite
from strands_tito.conformance.final_checks import UNKNOWN_ID
from strands_tito.conformance.laws import CHECKS, PARITY_CHECKS, WEIGHT_CHECKS
from strands_tito.conformance.profiles import PROFILES
from strands_tito.conformance.report import rows
from strands_tito.conformance.target import Target
from strands_tito.testing import Completion, HashPolicy, InProcessTransport, ScriptedRequest, scripted_engine
from strands_tito.testing.moves import Ask, Cut, StopAt
from support.scripted import is_probe, tokenizer
from tito_core.chat.ending import Opened
from tito_core.turn import request


def end() -> int:
    return int(tokenizer().eos_token_id)


def run(wire: str, profile: str, seed: int = 0, weights: str | None = None) -> suite.Outcome:
    backend = "sglang" if wire == "sglang" else "vllm"
    transport = planted(SOUND, wire, tokenizer(), end())
    target = Target(
        backend, "http://scripted", tokenizer(), transport=transport, seed=seed, experts=EXPERTS, weights=weights
    )
    return suite.run(target, PROFILES[profile])


@pytest.mark.parametrize("wire", SERVERS)
def test_a_sound_engine_passes_and_every_check_is_made(wire: str) -> None:
    outcome = run(wire, "standard")
    assert outcome.broken is None, (str(outcome.broken), outcome.moves)
    assert outcome.error is None, outcome.moves
    not_made = {row.check for row in rows(outcome) if row.verdict != "holds"}
    assert not_made == {
        "refused",
        *PARITY_CHECKS,
        *WEIGHT_CHECKS,
        *(() if wire == "sglang" else ("left",)),
        *(("text",) if wire == "vllm" else ()),
    }
    compared = outcome.tally.passed["rescored"]
    assert compared > sum(outcome.tally.not_applicable["rescored"].values())


@pytest.mark.parametrize("wire", SERVERS)
def test_weights_change_under_answers_where_the_owner_asks_for_it(wire: str) -> None:
    outcome = run(wire, "quick", weights="/scripted")
    assert outcome.sound, (str(outcome.broken), outcome.error, outcome.moves)
    passed, left_out = outcome.tally.passed, outcome.tally.not_applicable
    if wire == "vllm-completions":  # whose answers name no version, so that nothing can be held to one
        assert not passed["changed"]
        assert left_out["changed"] == left_out["live"] == {"The server names no version on an answer.": 1}
        assert outcome.server.weight_updates == 1
        return
    assert passed["changed"] > outcome.server.weight_updates > 1
    assert passed["live"] > 10
    assert any("weights that are gone" in why for why in left_out["rescored"])
    assert passed["rescored"] > 300


def test_an_id_that_no_token_has_may_be_spelled_in_any_way() -> None:
    """SGLang spells it as id 0. Qwen3 has 267 rows more than its tokenizer has tokens."""
    vocabulary = len(tokenizer())
    alphabet = [*tokenizer().encode("0123456789 a b c d e", add_special_tokens=False), vocabulary + 3]
    engine = scripted_engine(
        "sglang",
        HashPolicy(vocabulary + 8, alphabet=alphabet, eos_ids=[end()]),
        vocab_size=vocabulary + 8,
        eos_ids=[end()],
        decode=lambda ids: str(tokenizer().decode([token if token < vocabulary else 0 for token in ids])),
    )
    target = Target("sglang", "http://scripted", tokenizer(), transport=lambda: InProcessTransport(engine))
    outcome = suite.run(target, PROFILES["quick"])
    assert "text" not in str(outcome.broken), str(outcome.broken)
    assert outcome.tally.not_applicable["text"][UNKNOWN_ID] > 5
    assert outcome.tally.passed["text"] > 0


def test_a_server_need_not_name_the_stop_string() -> None:
    """vLLM up to 0.31 does not, on `/inference/v1/generate`; then the answer's text tells."""

    def unnamed(view: View, request: ScriptedRequest) -> None:
        view.part.pop("stop_reason", None)

    transport = planted(replace(SOUND, edit=unnamed), "vllm", tokenizer(), end())
    target = Target("vllm", "http://scripted", tokenizer(), transport=transport)
    moves = [StopAt(stop=stop, text=text) for text in ("Hi", "Ho", "Hm") for stop in (" ", "e", ".")]
    outcome = suite.replay(target, PROFILES["quick"], moves)
    assert outcome.sound, (str(outcome.broken), outcome.error)
    assert outcome.tally.passed["stopped"] > len(moves)


def test_weights_are_left_alone_where_nobody_asks() -> None:
    outcome = run("sglang", "quick")
    assert outcome.server.weight_updates == 0
    assert outcome.server.log is not None
    assert {row.verdict for row in rows(outcome) if row.check in WEIGHT_CHECKS} == {"not applicable"}
    assert outcome.server.policy.info.weight_version == "default"


def _one_wire_each() -> list[Any]:
    """Take each defect on one of its wires, in turn; `make defects` takes all."""
    found: dict[str, list[tuple[Defect, str]]] = {}
    for defect, wire in all_defects():
        found.setdefault(defect.name, []).append((defect, wire))
    chosen = [pairs[number % len(pairs)] for number, pairs in enumerate(found.values())]
    return [pytest.param(defect, wire, id=f"{defect.name}-{wire}") for defect, wire in chosen]


@pytest.mark.parametrize(("defect", "wire"), _one_wire_each())
def test_a_planted_defect_is_noticed(defect: Defect, wire: str) -> None:
    verdict = tried(defect, wire, tokenizer(), end(), PROFILES["standard"])
    assert verdict.caught_by is not None
    assert verdict.expected, verdict.problem
    assert verdict.caught_by in CHECKS or verdict.caught_by == "connecting"


@pytest.mark.parametrize("defect", PARITY, ids=lambda defect: defect.name)
def test_a_defect_of_parity_shows_beside_another_server_alone(defect: Defect) -> None:
    by_itself = replace(defect, beside=False)
    verdict = tried(by_itself, "sglang", tokenizer(), end(), PROFILES["quick"])
    assert verdict.caught_by is None, verdict.problem
    assert verdict.turns > 10


def test_there_are_at_least_sixty_defects_on_both_wires() -> None:
    pairs = list(all_defects())
    assert len({defect.name for defect, _ in pairs}) >= 95
    assert len({(defect.name, wire) for defect, wire in pairs}) == len(pairs)
    assert {wire for _, wire in pairs} == set(SERVERS)


def test_what_breaks_a_law_is_shrunk_and_played_again() -> None:
    defect = next(defect for defect, _ in all_defects() if defect.name == "grammar-ignored")
    transport = planted(defect, "sglang", tokenizer(), end())
    target = Target("sglang", "http://scripted", tokenizer(), transport=transport)
    outcome = suite.run(target, PROFILES["standard"])
    assert outcome.broken is not None
    assert outcome.broken.check.name in ("forced", "shaped")
    assert len(outcome.moves) == 1
    again = suite.replay(target, PROFILES["standard"], list(outcome.moves))
    assert again.broken is not None
    assert again.broken.check == outcome.broken.check


class Thinks:
    """A policy that begins to think in the middle of an answer."""

    def __init__(self, ids: list[int], end: int, vocabulary: int) -> None:
        self._said = [*ids, end]
        self._policy = HashPolicy(vocabulary, eos_ids=[end])
        self.score, self.top = self._policy.score, self._policy.top

    def __call__(self, request: ScriptedRequest) -> Completion:
        if is_probe(request) or request.scoring:
            return self._policy(request)
        said = self._said[: request.max_new_tokens]
        return Completion(said, finish="length" if len(said) == request.max_new_tokens else None)


def thinking(said: str = "Hello. <think>\nHm, hm, hm.\n</think>\n\nHm, hm and hm") -> Target:
    qwen = tokenizer("qwen3-tiny")
    ids = qwen.encode(said, add_special_tokens=False)
    script, stop = Thinks(ids, qwen.eos_token_id, len(qwen)), [qwen.eos_token_id]
    engine = scripted_engine("vllm", script, vocab_size=len(qwen), eos_ids=stop, scale_out=True)
    return Target("vllm", "http://scripted", qwen, transport=lambda: InProcessTransport(engine))


@pytest.mark.parametrize("tokens", [2, 3, 5, 9, 11, 13])
def test_reasoning_that_was_cut_off_is_closed_though_the_template_later_strips_it(tokens: int) -> None:
    outcome = suite.replay(thinking(), PROFILES["quick"], [Cut(tokens=tokens), Ask(text="Ho"), Ask(text="Hm")])
    assert outcome.sound, (str(outcome.broken), outcome.error)
    assert outcome.tally.passed["rendering"] >= 3


@pytest.mark.parametrize(("says", "tokens"), [(Opened.MESSAGE, 5), (Opened.REASONING, 13)])
def test_reasoning_that_is_closed_wrongly_is_noticed(says: Opened, tokens: int) -> None:
    with mock.patch.object(request, "opened", return_value=says):
        outcome = suite.replay(thinking(), PROFILES["quick"], [Cut(tokens=tokens), Ask(text="Ho")])
    assert outcome.broken is not None
    assert outcome.broken.check.name == "rendering"


CALLING = 'Hm. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 22}}\n</tool_call><tool_call>\n{"name": "add"'


@pytest.mark.parametrize("tokens", range(2, 32))
def test_a_call_that_was_cut_off_is_closed_where_its_tags_are_tokens(tokens: int) -> None:
    """A policy of random weights begins one in about 200,000 tokens, which is once in 200 runs of the suite."""
    moves = [Cut(tokens=tokens), Ask(text="Ho"), Cut(tokens=tokens), Ask(text="Hm")]
    outcome = suite.replay(thinking(CALLING), PROFILES["quick"], moves)
    assert outcome.sound, (str(outcome.broken), outcome.error)


@pytest.mark.parametrize(("says", "tokens"), [(Opened.MESSAGE, 8), (Opened.CALL, 2)])
def test_a_call_that_is_closed_wrongly_is_noticed(says: Opened, tokens: int) -> None:
    with mock.patch.object(request, "opened", return_value=says):
        outcome = suite.replay(thinking(CALLING), PROFILES["quick"], [Cut(tokens=tokens), Ask(text="Ho")])
    assert outcome.broken is not None
    assert outcome.broken.check.name == "rendering"


def test_a_stop_in_reasoning_begins_the_history_anew() -> None:
    outcome = suite.replay(
        thinking("Hm. <think>\nHm"), PROFILES["quick"], [Ask(text=text) for text in ("Hi", "Ho", "Hm")]
    )
    assert outcome.sound, (str(outcome.broken), outcome.error)
    assert outcome.tally.passed["parent"] >= 3
