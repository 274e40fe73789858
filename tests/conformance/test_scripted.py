"""The suite over scripted engines: it passes sound engines, and notices every planted defect."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import aiohttp
import pytest

from conformance.defects import all_defects
from conformance.defects.defect import SERVERS, SOUND, SOUND_WITH_IMAGES, Defect, plant
from conformance.defects.modes import MODES
from conformance.defects.parity import PARITY
from conformance.defects.requests import REQUESTS
from conformance.defects.sampling import SAMPLING
from conformance.defects.trial import FOLDERS, target_of, try_defect
from conformance.defects.views import EXPERTS, View
from conformance.defects.weights import WEIGHTS
from support.scripted import tokenizer
from tito_conformance import suite
from tito_conformance.checks import CHECKS, PARITY_CHECKS, PROFILES, WEIGHT_CHECKS, BrokenLawError, Profile, Tally
from tito_conformance.connection import connect
from tito_conformance.report import rows
from tito_conformance.servers import SingleServer
from tito_conformance.target import UNKNOWN_ID, Target
from tito_conformance.testing import (
    Completion,
    HashPolicy,
    InProcessTransport,
    ScriptedEngine,
    ScriptedRequest,
    scripted_engine,
)
from tito_conformance.testing.moves import Ask, Cut, Move, StopAt
from tito_core.backend.http.client import HttpResponse
from tito_core.chat.ending import Opened
from tito_core.turn import request

EXAMPLES = int(os.environ.get("TITO_EXAMPLES", "0"))
SHORT = Profile("short", 4, 6, 1)
ALL_CHECKS = Profile("all checks", 24, 10, 1)
ONE_PROMPT = replace(PROFILES["standard"], repeats=1)
NEED_MORE_PROMPTS = ("temperature-ignored", "top-k-ignored", "top-too-unlikely", "seed-ignored")
"""Defects that the first fixed prompt does not show."""


def end() -> int:
    return int(tokenizer().eos_token_id)


def run(wire: str, profile: Profile, seed: int = 0, weights: tuple[str, ...] = ()) -> suite.Outcome:
    return suite.run(target_of(wire, seed=seed, experts=EXPERTS, weights=weights), profile)


GENERATES = {"/inference/v1/generate", "/v1/completions", "/generate"}
READS = {"/tokenize", "/v1/models", "/version", "/server_info", "/model_info", "/weight_info", "/v1/loads"}
ABORTS = {"/inference/v1/abort_requests", "/abort_request"}
"""Each with the id of a request of the run."""


@pytest.mark.suite
@pytest.mark.parametrize("wire", SERVERS)
def test_the_profile_for_others_servers_changes_none_of_their_settings(wire: str) -> None:
    target, profile = target_of(wire, varied=True), PROFILES["production"]
    assert target.transport is not None
    engine = cast(InProcessTransport, target.transport()).engine
    engine.latency = 0.05
    outcome = suite.run(target, profile)
    assert outcome.sound, (str(outcome.broken), outcome.error)
    assert {each.path for each in engine.exchanges} <= GENERATES | READS | ABORTS
    known = {request.server_id for request in engine.requests}
    for each in engine.exchanges:
        if each.path in ABORTS:
            assert known & set(re.findall(r"[\w-]*[0-9a-f]{32}[\w-]*", each.body.decode()))
    assert sum(each.path in GENERATES for each in engine.exchanges) <= profile.most_requests()
    assert profile.at_once is not None
    assert engine.peak <= profile.at_once


@pytest.mark.suite
@pytest.mark.parametrize(("wire", "after"), [("vllm", 40), ("sglang", 60), ("sglang", 85)])
def test_weights_that_another_client_loads_break_no_law(wire: str, after: int) -> None:
    """A trainer that shares the server makes scores and equal requests differ: the run ends and says so."""
    target = target_of(wire, varied=True)
    assert target.transport is not None
    engine = cast(InProcessTransport, target.transport()).engine

    def load(number: int, _: ScriptedRequest) -> None:
        if number == after:
            for folder in FOLDERS:  # the first one changes nothing
                engine.state.load(folder)
            engine.state.set_version("theirs")

    engine.fault = load
    outcome = suite.run(target, PROFILES["production"])
    assert outcome.broken is None, str(outcome.broken)
    assert outcome.error is not None
    assert outcome.error.startswith("ServerChangedError: ")
    assert "from 'default' to 'theirs'" in outcome.error


class Reset(InProcessTransport):
    """Loses the connection of a generation, and garbles an answer to the check that follows."""

    def __init__(self, engine: ScriptedEngine, at: int, garbled: int) -> None:
        super().__init__(engine)
        self.left, self.garbled, self.checks = at, garbled, 0

    async def send(self, method: str, url: str, headers: Any, body: Any) -> HttpResponse:
        self.left -= method == "POST" and self.left > 0
        if method == "POST" and self.left == 0 and not self.checks:
            self.checks = 1
            raise aiohttp.ServerDisconnectedError
        response = await super().send(method, url, headers, body)
        self.checks += method == "GET" and self.checks > 0
        if self.checks - 1 != self.garbled:
            return response
        self.garbled = 0

        async def cut() -> AsyncIterator[bytes]:
            yield b'{"status"'

        return HttpResponse(200, {"content-type": "application/json"}, cut(), response.aclose)


@pytest.mark.suite
@pytest.mark.parametrize(("wire", "garbled"), [("vllm", 1), ("sglang", 2)])
def test_one_garbled_answer_after_a_lost_connection_is_no_other_server(wire: str, garbled: int) -> None:
    target = target_of(wire, varied=True)
    assert target.transport is not None
    transport = Reset(cast(InProcessTransport, target.transport()).engine, 40, garbled)
    outcome = suite.run(replace(target, transport=lambda: transport), PROFILES["production"])
    assert outcome.sound, (str(outcome.broken), outcome.error)
    assert transport.checks > garbled, "the server was checked again"
    assert transport.garbled == 0


@pytest.mark.suite
@pytest.mark.parametrize("wire", SERVERS)
def test_a_sound_engine_passes_every_check_and_keeps_its_weights(wire: str) -> None:
    outcome = run(wire, ALL_CHECKS)
    assert outcome.broken is None, (str(outcome.broken), outcome.moves)
    assert outcome.error is None, outcome.moves
    not_passed = {row.check for row in rows(outcome) if row.verdict != "holds"}
    assert not_passed == {
        "refused",
        "images",
        "looked",
        "adapted",
        *PARITY_CHECKS,
        *WEIGHT_CHECKS,
        *(() if wire == "sglang" else ("left",)),
        *(("text",) if wire == "vllm" else ()),
        *(("versions", "aborted") if wire == "vllm-completions" else ()),
    }
    # SGLang's logprobs are those at the temperature that a move draws, and a score is at temperature 1.
    assert outcome.tally.passed["rescored"] > (1_500 if wire == "sglang" else 2_000)
    assert outcome.server.weight_updates == 0
    assert outcome.server.recorder.read is not None
    assert {row.verdict for row in rows(outcome) if row.check in WEIGHT_CHECKS} == {"not applicable"}
    if wire == "sglang":
        assert outcome.server.policy.info.weight_version == "default"
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        fractions = {value for value in map(float, outcome.server.recorder.sent[name]) if value % 1}
        assert fractions, name
        assert all(round(each, 2) != each for each in fractions), f"a client that rounds {name} would go unseen"


@pytest.mark.suite
@pytest.mark.parametrize("wire", ["vllm", "sglang"])
def test_a_sound_engine_that_reads_images_passes_every_check(wire: str) -> None:
    target = target_of(wire, SOUND_WITH_IMAGES, experts=EXPERTS, weights=FOLDERS)
    outcome = suite.run(target, replace(SHORT, conversations=12))
    assert outcome.sound, (str(outcome.broken), outcome.error, outcome.moves)
    passed = outcome.tally.passed
    assert passed["looked"] == 4
    assert passed["fresh"] == 1
    assert passed["images"] > 10


@pytest.mark.suite
def test_two_sound_engines_that_read_images_give_equal_ledgers() -> None:
    one, other = (target_of(wire, SOUND_WITH_IMAGES, greedily=True) for wire in ("vllm", "sglang"))
    outcome = suite.run(one, SHORT, against=other)
    assert outcome.sound, (str(outcome.broken), outcome.error, outcome.moves)
    assert outcome.tally.passed["images"] > 10
    assert outcome.tally.passed["ledgers"] > 10


@pytest.mark.suite
@pytest.mark.parametrize("wire", ["sglang", "vllm-completions"])
def test_weights_change_during_answers_where_the_owner_allows_it(wire: str) -> None:
    outcome = run(wire, PROFILES["quick"], weights=FOLDERS[:1])
    assert outcome.sound, (str(outcome.broken), outcome.error, outcome.moves)
    passed, left_out = outcome.tally.passed, outcome.tally.not_applicable
    if wire == "vllm-completions":  # its responses have no version
        assert not passed["changed"]
        assert left_out["changed"] == left_out["live"] == {"The server reports no version with an answer.": 1}
        assert outcome.server.weight_updates == 1
        return
    assert passed["changed"] > outcome.server.weight_updates > 1
    assert passed["live"] > 10
    assert any("older weights" in reason for reason in left_out["rescored"])
    assert passed["rescored"] > 300


@pytest.mark.suite
@pytest.mark.parametrize("wire", ["vllm", "vllm-completions"])  # test_requests loads two on SGLang's wire
def test_two_folders_of_weights_are_loaded_in_turn_and_the_first_one_last(wire: str) -> None:
    outcome = run(wire, PROFILES["quick"], weights=FOLDERS)
    assert outcome.sound, (str(outcome.broken), outcome.error, outcome.moves)
    assert outcome.server.folder == FOLDERS[0]
    assert outcome.server.weight_updates >= 4
    assert outcome.tally.passed["changed"] > 1_000
    if wire == "vllm":
        assert outcome.tally.passed["live"] > 10
        assert outcome.tally.passed["rescored"] > 300
        assert any("older weights" in reason for reason in outcome.tally.not_applicable["rescored"])


RELOADS = [each for each in WEIGHTS if each.weights == 2][:: 1 if EXAMPLES else 2]
"""`make defects` takes all."""


@pytest.mark.suite
@pytest.mark.parametrize("number", range(len(RELOADS)), ids=[defect.name for defect in RELOADS])
def test_a_defect_of_reloads_is_visible_only_with_two_folders(number: int) -> None:
    defect, wire = RELOADS[number], SERVERS[number % len(SERVERS)]
    alone = try_defect(replace(defect, weights=1), wire, tokenizer(), end(), SHORT)
    assert alone.caught_by is None, alone.problem
    verdict = try_defect(defect, wire, tokenizer(), end(), SHORT)
    assert (verdict.caught_by, verdict.turns) == ("changed", 0), verdict.problem


@pytest.mark.suite
def test_an_id_without_a_token_may_have_any_text() -> None:
    """SGLang decodes it as id 0. Qwen3 has 267 more rows than its tokenizer has tokens."""
    vocabulary = len(tokenizer())
    alphabet = [*tokenizer().encode("0123456789 a b c d e f g h i j k l m n", add_special_tokens=False), vocabulary + 3]
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
    assert outcome.sound, str(outcome.broken)
    assert outcome.tally.not_applicable["text"][UNKNOWN_ID] > 0
    assert outcome.tally.passed["text"] > 0


@pytest.mark.suite
def test_a_server_need_not_report_the_stop_string() -> None:
    """vLLM up to 0.31 does not on `/inference/v1/generate`; the answer's text shows it then."""

    def remove_reason(view: View, request: ScriptedRequest) -> None:
        view.part.pop("stop_reason", None)

    transport = plant(replace(SOUND, edit=remove_reason), "vllm", tokenizer(), end())
    target = Target("vllm", "http://scripted", tokenizer(), transport=transport)
    moves = [StopAt(stop=stop, text=text) for text in ("Hi", "Ho", "Hm") for stop in (" ", "e", ".")]
    outcome = suite.replay(target, PROFILES["quick"], moves)
    assert outcome.sound, (str(outcome.broken), outcome.error)
    assert outcome.tally.passed["finish"] == len(moves)


def _one_wire_each() -> list[Any]:
    """Take every sixth defect on one of its wires, in rotation; `make defects` takes all on all wires.

    `make test` takes a fifth of these, `make suite` the others.
    """
    by_name: dict[str, list[tuple[Defect, str]]] = {}
    for defect, wire in all_defects():
        if defect in SAMPLING:  # planted in test_sampler
            continue
        by_name.setdefault(defect.name, []).append((defect, wire))
    step = 1 if EXAMPLES else 6
    chosen = [pairs[number % len(pairs)] for number, pairs in enumerate(by_name.values()) if number % step == 0]
    return [pytest.param(defect, wire, id=f"{defect.name}-{wire}") for defect, wire in chosen]


@pytest.mark.suite
@pytest.mark.parametrize(("defect", "wire"), _one_wire_each())
def test_a_planted_defect_is_noticed(defect: Defect, wire: str) -> None:
    profile = PROFILES["standard"] if defect.name in NEED_MORE_PROMPTS else ONE_PROMPT
    verdict = try_defect(defect, wire, tokenizer(), end(), profile)
    assert verdict.caught_by is not None
    assert verdict.expected, verdict.problem
    assert verdict.caught_by in {*CHECKS, "connecting", "error"}


@pytest.mark.suite
@pytest.mark.parametrize("number", range(len(REQUESTS)), ids=[defect.name for defect in REQUESTS])
def test_a_defect_that_only_unusual_requests_show_is_noticed(number: int) -> None:
    defect = REQUESTS[number]
    wire = defect.wires[number % len(defect.wires)]
    verdict = try_defect(defect, wire, tokenizer(), end(), PROFILES["quick"])
    assert verdict.caught_by is not None, wire
    assert verdict.expected, verdict.problem


@pytest.mark.suite
@pytest.mark.parametrize("defect", PARITY, ids=lambda defect: defect.name)
def test_a_defect_of_parity_is_visible_only_with_a_second_server(defect: Defect) -> None:
    alone = replace(defect, needs_second_server=False)
    verdict = try_defect(alone, "sglang", tokenizer(), end(), SHORT)
    assert verdict.caught_by in (None, "sampler", "obeyed"), verdict.problem  # other logprobs than those of sampling
    assert verdict.turns > 10 or verdict.caught_by == "obeyed"


@pytest.mark.suite
@pytest.mark.parametrize("number", range(len(MODES)), ids=[mode.name for mode in MODES])
def test_a_sound_server_of_another_mode_passes(number: int) -> None:
    mode = MODES[number]
    wire = mode.wires[number % len(mode.wires)]
    verdict = try_defect(mode, wire, tokenizer(), end(), SHORT, seed=number)
    assert verdict.caught_by is None, (wire, verdict.problem)


@pytest.mark.suite
def test_there_are_at_least_95_defects_on_all_wires() -> None:
    pairs = list(all_defects())
    assert len({defect.name for defect, _ in pairs}) >= 95
    assert len({(defect.name, wire) for defect, wire in pairs}) == len(pairs)
    assert {wire for _, wire in pairs} == set(SERVERS)


@pytest.mark.suite
def test_a_broken_law_is_shrunk_and_replayed() -> None:
    defect = next(defect for defect, _ in all_defects() if defect.name == "grammar-ignored")
    target = target_of("sglang", defect)
    outcome = suite.run(target, PROFILES["standard"])
    assert outcome.broken is not None
    assert outcome.broken.check.name in ("constrained", "refused")
    assert len(outcome.moves) == 1
    again = suite.replay(target, PROFILES["standard"], list(outcome.moves))
    assert again.broken is not None
    assert again.broken.check == outcome.broken.check


class FixedAnswer:
    """A policy that always returns the same ids, cut at the token limit."""

    def __init__(self, ids: list[int], end: int, vocabulary: int) -> None:
        self._output = [*ids, end]
        self._policy = HashPolicy(vocabulary, eos_ids=[end])
        self.score, self.top = self._policy.score, self._policy.top

    def __call__(self, request: ScriptedRequest) -> Completion:
        if request.measures or request.scoring:
            return self._policy(request)
        output = self._output[: request.max_new_tokens]
        return Completion(output, finish="length" if len(output) == request.max_new_tokens else None)


THINKING = "Hello. <think>\nHm, hm, hm.\n</think>\n\nHm, hm and hm"
CALLING = 'Hm. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 22}}\n</tool_call><tool_call>\n{"name": "add"'


def play(text: str, conversations: Iterable[list[Move]]) -> list[Tally | BrokenLawError]:
    """Play conversations on one server whose policy always answers `text`. Return a tally or the broken law of each."""
    qwen = tokenizer("qwen3-tiny")
    script = FixedAnswer(qwen.encode(text, add_special_tokens=False), qwen.eos_token_id, len(qwen))
    engine = scripted_engine("vllm", script, vocab_size=len(qwen), eos_ids=[qwen.eos_token_id], scale_out=True)
    target = Target("vllm", "http://scripted", qwen, transport=lambda: InProcessTransport(engine))

    async def play_all() -> list[Tally | BrokenLawError]:
        server, results = await connect(target), []
        for moves in conversations:
            tally = Tally()
            try:
                await suite.play_conversation(SingleServer(server, tally), moves)
                results.append(tally)
            except BrokenLawError as broken:
                results.append(broken)
        await server.policy.backend.aclose()
        return results

    return asyncio.run(play_all())


def test_truncated_reasoning_is_closed_though_the_template_strips_it_later() -> None:
    cuts = [2, 3, 5, 9, 11, 13]
    for tally in play(THINKING, [[Cut(tokens=tokens), Ask(text="Ho"), Ask(text="Hm")] for tokens in cuts]):
        assert isinstance(tally, Tally), str(tally)
        assert tally.passed["rendering"] >= 3


def test_a_truncated_call_is_closed_where_its_tags_are_tokens() -> None:
    """A policy of random weights begins a call once in about 200,000 tokens, which is once in 200 runs of the suite."""
    cuts = range(2, 32)
    results = play(
        CALLING,
        [[Cut(tokens=tokens), Ask(text="Ho"), Cut(tokens=tokens), Ask(text="Hm")] for tokens in cuts],
    )
    assert [str(each) for each in results if not isinstance(each, Tally)] == []
    assert len(results) == len(cuts)


@pytest.mark.suite
@pytest.mark.parametrize(
    ("text", "opened", "tokens"),
    [
        (THINKING, Opened.MESSAGE, 5),
        (THINKING, Opened.REASONING, 13),
        (CALLING, Opened.MESSAGE, 8),
        (CALLING, Opened.CALL, 2),
    ],
)
def test_a_truncated_part_that_is_closed_wrongly_is_noticed(text: str, opened: Opened, tokens: int) -> None:
    with (
        mock.patch.object(request, "open_part", return_value=opened),
        mock.patch.object(request, "_open_tags", return_value=None),
    ):
        [broken] = play(text, [[Cut(tokens=tokens), Ask(text="Ho")]])
    assert isinstance(broken, BrokenLawError)
    assert broken.check.name == "rendering"


def test_a_stop_in_reasoning_starts_a_new_root() -> None:
    [tally] = play("Hm. <think>\nHm", [[Ask(text=text) for text in ("Hi", "Ho", "Hm")]])
    assert isinstance(tally, Tally), str(tally)
    assert tally.passed["parent"] >= 3
