"""verl's own servers as a backend; verl itself runs under `make trainers`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strands_tito.export import sample_of, verl
from strands_tito.export.trainer import UnreadRewardError, prompt_response_of
from strands_tito.export.verl import output_of, outputs_of
from strands_tito.integrations.verl_backend import VerlBackend
from support.drafts import make_draft
from support.rollout_forests import chain, grow
from support.scripted import END, ids_of
from support.trainer_packages import run
from tito_core.backend import SamplingParams
from tito_core.backend.errors import BackendError, ProtocolViolationError, UnsupportedByServerError
from tito_core.backend.generate import generate, score
from tito_core.backend.protocol import TokenRequest
from tito_core.backend.sampling import Grammar
from tito_core.backend.semantics import semantics_of
from tito_core.ledger import Finish, Ledger, VersionSpan
from tito_core.termination import Termination, record_termination, termination_of

CONFIG: dict[str, Any] = {
    "name": "vllm",
    "logprobs_mode": "processed_logprobs",
    "prompt_length": 100,
    "response_length": 50,
    "max_model_len": None,
}
(STOP,) = ids_of(END)


def test_a_misspelt_option_is_refused() -> None:
    for rollout in (Ledger(), chain((3, 2))):
        with pytest.raises(TypeError, match="'respons_length'"):
            output_of(rollout, temperature=1.0, end_id=2, respons_length=1)


@dataclass
class Answer:
    """The fields that are read of verl's answer."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None = "completed"
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Client:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[tuple[str, list[int], dict[str, Any]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Answer:
        self.requests.append((request_id, prompt_ids, sampling_params))
        return self.answer


def request(**sampling: Any) -> TokenRequest:
    params = SamplingParams(**{"max_new_tokens": 4, "stop_token_ids": (STOP,), **sampling})
    return TokenRequest(np.array([1, 2, 3], np.int32), params, "request", "session")


@pytest.mark.parametrize(
    ("ids", "reason", "finish", "stop"),
    [
        ([5, STOP], "completed", Finish.STOP, STOP),
        ([5, 6, 7, 8], "completed", Finish.LENGTH, None),
        ([5, 6, 7, STOP], "completed", Finish.STOP, STOP),
        ([5, 6, 7, 8], "length", Finish.LENGTH, None),
        ([5, 6], "stop", Finish.STOP, None),
        ([5, 6], "aborted", Finish.ABORT, None),
        ([], "aborted", Finish.ABORT, None),
    ],
)
async def test_how_an_answer_ended_is_read_off_its_tokens(
    ids: list[int], reason: str, finish: Finish, stop: int | None
) -> None:
    client = Client(Answer(ids, [-1.0] * len(ids) if ids else None, reason))
    response = await generate(VerlBackend(client, CONFIG), request())
    assert response.output_ids.tolist() == ids
    assert response.logprobs.tolist() == [-1.0] * len(ids)
    assert (response.finish, response.stop) == (finish, stop)
    assert client.requests[0][:2] == ("session", [1, 2, 3])


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer([5, STOP], None), "no logprobs"),
        (Answer([5, STOP], [-1.0]), "2 output ids and 1 logprobs"),
        (Answer([5, STOP], [-1.0, float("nan")]), "Law 2|Law 4"),
        (Answer([5, 6, 7, 8, 9], [-1.0] * 5), "4 tokens .* 5"),
        (Answer([STOP, 6, 7, 8], [-1.0] * 4), "did not end the output"),
        (Answer([], []), "no output ids"),
    ],
)
async def test_an_answer_that_breaks_a_law_does_not_come_in(answer: Answer, error: str) -> None:
    with pytest.raises(ProtocolViolationError, match=error):
        await generate(VerlBackend(Client(answer), CONFIG), request())


@pytest.mark.parametrize(
    ("fields", "version", "steps"),
    [
        ({"global_steps": 7}, "7", {7}),
        ({"global_steps": 8, "min_global_steps": 8, "max_global_steps": 8}, "8", {8}),
        ({"global_steps": 8, "min_global_steps": 7, "max_global_steps": 8}, None, {7, 8}),
        ({}, None, set()),
        ({"global_steps": None, "min_global_steps": None, "max_global_steps": None}, None, set()),
    ],
)
async def test_weights_that_changed_in_mid_answer_are_unknown_and_their_bounds_are_kept(
    fields: dict[str, Any], version: str | None, steps: set[int]
) -> None:
    client = Client(Answer([5, STOP], [-1.0, -2.0], extra_fields=fields))
    backend = VerlBackend(client, CONFIG)
    response = await generate(backend, request())
    assert response.versions == (VersionSpan(0, 2, version),)
    assert set(backend.steps) == steps


@pytest.mark.parametrize(
    ("versions", "bounds"), [(("8", "9"), [8, 9]), (("8", None), []), ((None, "8"), []), ((None,), []), (("v",), [])]
)
def test_a_row_has_the_bounds_of_its_weights_where_all_are_known(versions: tuple[str | None, ...], bounds: Any) -> None:
    sample = sample_of(chain((3, 2), (2, 3)))
    spans = (VersionSpan(start, start + 2, each) for start, each in zip((3, 7), versions, strict=False))
    sample = replace(sample, versions=tuple(spans))
    parts = prompt_response_of(sample, trainer="verl", temperature=1.0)
    extra = verl.fields_of(parts, sample)["extra_fields"]
    assert [extra[name] for name in ("min_global_steps", "max_global_steps") if name in extra] == bounds


@pytest.mark.parametrize(
    ("config", "temperature", "means"),
    [
        ({}, 0.7, (True, 0.7)),
        ({"logprobs_mode": "raw_logprobs"}, 0.7, (False, 1.0)),
        ({"logprobs_mode": None}, 0.7, (None, None)),
        ({"logprobs_mode": None}, 1.0, (None, 1.0)),
        ({"name": "sglang", "logprobs_mode": None}, 0.7, (True, 0.7)),
        ({"name": "sglang", "logprobs_mode": "raw_logprobs"}, 0.7, (True, 0.7)),
        ({"name": "another"}, 0.7, (True, 0.7)),
    ],
)
async def test_semantics_are_the_configurations(
    config: dict[str, Any], temperature: float, means: tuple[bool | None, float | None]
) -> None:
    info = await VerlBackend(Client(Answer([], [])), {**CONFIG, **config}).connect()
    found = semantics_of(info, SamplingParams(temperature=temperature))
    assert (found.processed, found.temperature) == means
    assert info.max_model_len == 149
    assert VerlBackend(Client(Answer([], [])), {**CONFIG, "max_model_len": 64}).info.max_model_len == 63


NEUTRAL = {
    "logprobs": True,
    "max_tokens": 4,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop_token_ids": [STOP],
    "ignore_eos": False,
}


@pytest.mark.parametrize(
    ("engine", "sampling", "sent"),
    [
        ("vllm", {}, {}),
        ("vllm", {"min_p": 0.1, "repetition_penalty": 1.1}, {"min_p": 0.1, "repetition_penalty": 1.1}),
        ("vllm", {"min_new_tokens": 2, "seed": 0}, {"min_tokens": 2, "seed": 0}),
        ("vllm", {"stop": ("X",), "extra": {"bad_words": []}}, {"stop": ["X"], "bad_words": []}),
        ("sglang", {"seed": 7}, {"sampling_seed": 7}),
        ("another", {"top_k": 5}, {"top_k": 5}),
    ],
)
async def test_what_is_recorded_is_sent_under_the_engines_name(
    engine: str, sampling: dict[str, Any], sent: dict[str, Any]
) -> None:
    """What is not sent, verl's server takes from its own configuration."""
    client = Client(Answer([5, 6, STOP], [-1.0, -2.0, -1.0]))
    await generate(VerlBackend(client, {**CONFIG, "name": engine}), request(**sampling))
    assert client.requests[0][2] == {**NEUTRAL, **sent}


@pytest.mark.parametrize(
    ("engine", "sampling", "named"),
    [
        ("vllm", {"grammar": Grammar(kind="json_schema", value="{}")}, "no grammar"),
        ("vllm", {"extra": {"stop_regex": "a+"}}, "stop_regex"),
        ("sglang", {"min_new_tokens": 2}, "min_new_tokens=2"),
        ("sglang", {"stop": ("X",)}, r"stop=\['X'\]"),
        ("sglang", {"extra": {"stop_regex": "a+"}}, "stop_regex"),
        ("another", {"seed": 0}, "seed=0"),
    ],
)
async def test_what_verls_servers_do_not_apply_is_refused(engine: str, sampling: dict[str, Any], named: str) -> None:
    """verl starts SGLang without a tokenizer, so that a stop string would end the server."""
    client = Client(Answer([5, 6, STOP], [-1.0, -2.0, -1.0]))
    with pytest.raises(UnsupportedByServerError, match=named):
        await generate(VerlBackend(client, {**CONFIG, "name": engine}), request(**sampling))
    assert client.requests == []


async def test_scoring_raises_and_abort_does_nothing() -> None:
    backend = VerlBackend(Client(Answer([], [])), CONFIG)
    with pytest.raises(UnsupportedByServerError, match="cannot score"):
        await score(backend, [1, 2])
    await backend.abort("request")
    await backend.aclose()


class Made(SimpleNamespace):
    """One of verl's own classes, with whatever it is given."""


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's agent loops, as far as an output is made of them."""
    module = SimpleNamespace(AgentLoopOutput=Made, AgentLoopMetrics=Made)
    monkeypatch.setattr(verl, "import_optional", lambda name, extra: module)


@pytest.mark.usefixtures("loops")
def test_an_output_is_a_rollouts_with_its_steps_and_its_end() -> None:
    ledger = chain((3, 2), (2, 3))
    sample = sample_of(ledger)
    [one] = outputs_of(ledger, temperature=1.0, end_id=2, messages=4, generating_s=1.5)
    assert [*one.prompt_ids, *one.response_ids] == sample.token_ids.tolist()
    assert len(one.response_ids) == len(one.response_mask) == len(one.response_logprobs)
    assert sum(one.response_mask) == sum(sample.loss_mask.tolist())
    assert (one.num_turns, one.metrics.generate_sequences, one.reward_score) == (4, 1.5, sample.reward)
    extra = dict(one.extra_fields)
    assert (extra["termination"], extra["rollout_id"]) == (sample.termination.value, ledger.uuid)
    assert vars(output_of(ledger, temperature=1.0, end_id=2, messages=4, generating_s=1.5)) == vars(one)


@pytest.mark.usefixtures("loops")
def test_the_output_whose_mask_counts_for_all_trains_tokens_after_the_cut_too() -> None:
    """GRPO reads the last output's mask for all: a long history leaves no trained token of the last path here."""
    ledger = chain((3, 2), (4, 3))
    grow(ledger, 1, 3, 2)
    grow(ledger, 1, 4, 2)
    ledger.annotate("reward", 1.0)
    outputs = outputs_of(ledger, temperature=1.0, end_id=2, prompt_length=3, response_length=9)
    assert [(one.extra_fields["trajectory"], sum(one.response_mask)) for one in outputs] == [(1, 0), (0, 5)]


@pytest.mark.usefixtures("loops")
def test_rewards_that_grpo_ignores_are_refused_where_it_is_known_and_else_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = Ledger()
    for agent, reward in (("solver", 1.0), ("judge", -1.0)):
        turn = ledger.commit(make_draft(None, 0, [100] * 2, [200] * 3, agent=agent))
        ledger.annotate("reward", reward, turn=turn.index)
    options: dict[str, Any] = {"temperature": 1.0, "end_id": 2, "logprobs": "omit"}
    lost = (
        r"verl's v1 GRPO .* of solver, .*: those of 1 rows \(judge 1\) are lost, 1 of 2 in absolute value\. Train one"
    )
    with pytest.raises(UnreadRewardError, match=lost):
        outputs_of(ledger, adv_estimator="grpo", **options)
    assert len(outputs_of(ledger, adv_estimator="grpo", agent="judge", **options)) == 1
    assert [one.reward_score for one in outputs_of(ledger, adv_estimator="reinforce_plus_plus", **options)] == [-1, 1]
    assert not caplog.messages
    assert len(outputs_of(ledger, **options)) == 2
    assert re.search(lost, caplog.text)


@pytest.mark.usefixtures("loops")
def test_a_rollout_without_a_turn_of_the_agent_is_an_output_that_trains_nothing() -> None:
    boss = Ledger(group_id="g")  # which branched, and needed no worker
    for _ in range(2):
        boss.commit(make_draft(None, 0, [100] * 2, [200] * 3, agent="boss"))
    boss.annotate("reward", 1.0)
    record_termination(boss, Termination.COMPLETED)
    for ledger, logprobs in product((Ledger(group_id="g"), boss), ("checked", "omit")):
        options: dict[str, Any] = {"temperature": 1.0, "end_id": 2, "agent": "worker", "logprobs": logprobs}
        [none] = outputs_of(ledger, **options)
        assert (none.prompt_ids, none.response_ids, none.response_mask) == ([2], [2], [0])
        assert (none.reward_score, none.num_turns) == (0.0, 0)
        extra = none.extra_fields
        assert (extra["rollout_id"], extra["group_id"], extra["agent"]) == (ledger.uuid, "g", None)
        assert extra["termination"] == (Termination.COMPLETED if ledger is boss else None)
        assert (none.response_logprobs is None) == (logprobs == "omit")
        assert vars(output_of(ledger, branches="last", **options)) == vars(none)


@pytest.mark.parametrize("error", [RuntimeError("engine core died"), TimeoutError(), ValueError("the actor died")])
async def test_what_verls_client_raises_is_an_engines_error(error: Exception) -> None:
    """Ray's errors are none of ours: as the agent's own error the rollout would be trained."""

    class Broken:
        async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any) -> Any:
            raise error

    with pytest.raises(BackendError, match=rf"verl's client raised {type(error).__name__}: {error}") as found:
        await generate(VerlBackend(Broken(), CONFIG), request())
    assert found.value.__cause__ is error
    assert termination_of(found.value) is Termination.ENGINE_ERROR


@pytest.mark.parametrize("ended", list(Termination))
def test_a_rollout_that_ended_from_outside_has_reward_0_and_another_its_own_or_none(ended: Termination) -> None:
    """verl takes rewards of all rollouts of a batch or of none."""
    ledger = chain((3, 2))
    record_termination(ledger, ended)
    outside = sample_of(ledger).ended_outside
    for reward in (None, 1.0):
        ledger.annotate("reward", reward)
        parts = prompt_response_of(sample_of(ledger), trainer="verl", temperature=1.0)
        assert verl.fields_of(parts, sample_of(ledger))["reward_score"] == (0.0 if outside else reward)
        assert any(parts.mask) == (not outside)


@pytest.mark.trainers
@pytest.mark.parametrize("version", ["0.8.0", "0.9.1"])
def test_verls_worker_runs_our_loop_and_gives_a_batch(version: str) -> None:
    output = run("verl_check.py", f"verl-{version}")
    assert output.splitlines()[-1] == f"verl: ok, {version}"
