"""One rollout on either wire: how an agent is loaded and run, and what its ledger contains."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strands import Agent, tool
from strands.hooks import MessageAddedEvent
from strands.tools import ToolProvider

from strands_tito.collect import AgentError, InProcess, Rollout, RolloutResult, Tasks, collect, collected, entries
from strands_tito.collect.rollout import AgentCode
from strands_tito.inspect.verify import rescore
from support import collect_agents
from support.scripted import BACKENDS, Says, backend_of, call, engine_of, policy_of
from tito_conformance.testing import Completion, Fault, always, every
from tito_core import Policy
from tito_core.hooks import LoopLimiter
from tito_core.ledger import check_ledger
from tito_core.store import LedgerFile

RUN = "0d3e2a44-9d63-4f10-8a53-0f8f8d1f8a10"
CALL = call("multiply", '{"a": 25, "b": 17}')
by_kind = pytest.mark.parametrize("kind", BACKENDS)


def policy(kind: str, *answers: Any, **options: Any) -> Policy:
    return replace(policy_of(kind), backend=backend_of(engine_of(kind, Says(*answers), **options), kind, patience_s=0))


def rollout(**task: Any) -> Rollout:
    (one,) = Tasks.of([{"id": "math-1", **task}])
    return Rollout(RUN, one, 3)


async def run_once(on: Policy, agent: Any, task: dict[str, Any] | None = None, **choices: Any) -> RolloutResult:
    result = await InProcess(on, agent, **choices).run(rollout(**(task or {"prompt": "What is 25 * 17?"})))
    check_ledger(result.ledger)
    return result


async def test_a_run_returns_the_reward() -> None:
    result = await run_once(policy("sglang", CALL, "It is 425."), collect_agents.run)
    ledger = result.ledger
    assert (result.termination, result.failure) == ("completed", None)
    assert len(ledger) == 2
    assert ledger.annotation("reward") == float(len("It is 425.\n"))
    assert ledger.annotations[-1].name == "termination"
    assert ledger.annotation("termination") == "completed"
    header = ledger.header
    assert (header.group_id, header.task_id) == ("0d3e2a44/math-1", "math-1")
    assert header.user == {"run": RUN, "sample": 3, "task_digest": rollout(prompt="What is 25 * 17?").task.digest}
    assert header.certificate is not None
    assert ledger.retained() == [], "a finished rollout is sealed"


async def test_a_factorys_agent_is_asked_the_prompt() -> None:
    on = policy("sglang", "It is 425.")
    for prompt in ("What is 25 * 17?", [{"text": "What is 25 * 17?"}]):
        result = await run_once(on, collect_agents.factory, {"prompt": prompt})
        assert (result.termination, result.failure) == ("completed", None)
        assert result.ledger.annotation("reward") is None
        returned = on.tokenizer.decode(result.ledger[0].draft.prompt_ids)
        assert "What is 25 * 17?" in returned


async def test_rollouts_of_a_group_do_not_see_what_others_did_to_their_task(tmp_path: Path) -> None:
    def instruct(event: MessageAddedEvent) -> None:
        if event.message["role"] == "user":
            event.message["content"].append({"text": "Answer in one word."})

    def make(model: Any, task: Any) -> Agent:
        agent = Agent(model=model, callback_handler=None)
        agent.hooks.add_callback(MessageAddedEvent, instruct)
        return agent

    async def run(model: Any, task: Any) -> None:
        agent = make(model, task)
        await agent.invoke_async(task["prompt"])
        task["prompt"].append(task.pop("id"))

    for code in (make, run):
        tasks = [{"id": "a", "prompt": [{"text": "Say one."}]}]
        await collect(tasks, InProcess(policy("vllm", "One."), code), tmp_path / code.__name__, n=3, concurrency=1)
        prompts = [ledger[0].draft.prompt_ids.tolist() for ledger in collected(tmp_path / code.__name__)]
        assert prompts == prompts[:1] * 3
        assert tasks == [{"id": "a", "prompt": [{"text": "Say one."}]}]


async def test_a_task_that_cannot_be_copied_is_a_failure_that_names_it() -> None:
    result = await run_once(policy("vllm", "Yes."), collect_agents.run, {"question": "?", "data": memoryview(b"...")})
    assert result.failure is not None
    assert re.match(r"TaskError: Task 'math-1' .*memoryview.*: use JSON values", result.failure.error)


@pytest.mark.parametrize("fault", [None, Fault(status=500)])
async def test_a_factorys_agent_is_cleaned_up(fault: Fault | None) -> None:
    """Its tools may have servers, which a thousand agents would keep until Python finds them."""
    providers: list[Provider] = []
    agents: list[Agent] = []

    def make(model: Any, task: Any) -> Agent:
        providers.append(Provider())
        agents.append(Agent(model=model, tools=[providers[-1]], callback_handler=None))
        assert len(providers[-1].consumers) == 1
        return agents[-1]

    result = await run_once(policy("vllm", "Yes.", **({"fault": always(fault)} if fault else {})), make)
    assert (result.failure is None) is (fault is None)
    assert providers[0].consumers == set()


async def test_a_failing_cleanup_does_not_hide_the_first_error() -> None:
    """Neither the end at a limit, which is not a failure, nor a cancellation of the collection."""

    def make(model: Any, task: Any) -> Agent:
        return Agent(model=model, tools=[Stubborn()], callback_handler=None)

    result = await run_once(policy("vllm", max_model_len=300), make, {"prompt": "word " * 400})
    assert (result.termination, result.failure) == ("context", None)
    result = await run_once(policy("vllm", "Yes."), make)
    assert (result.termination, len(result.ledger)) == ("tool_error", 1)
    assert result.failure is not None
    assert result.failure.error == "OSError: It does not stop."

    engine = engine_of("sglang", Says("Yes."), latency=60.0)
    on = replace(policy_of("sglang"), backend=backend_of(engine, "sglang"))
    task = asyncio.ensure_future(InProcess(on, make).run(rollout(prompt="Hello?")))
    while not engine.running:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Provider(ToolProvider):
    """Tools of a server that runs as long as an agent uses them."""

    def __init__(self) -> None:
        self.consumers: set[Any] = set()

    async def load_tools(self, **_: Any) -> list[Any]:
        return []

    def add_consumer(self, consumer_id: Any, **_: Any) -> None:
        self.consumers.add(consumer_id)

    def remove_consumer(self, consumer_id: Any, **_: Any) -> None:
        self.consumers.discard(consumer_id)


class Stubborn(Provider):
    """Its server does not stop."""

    def remove_consumer(self, consumer_id: Any, **_: Any) -> None:
        if consumer_id in self.consumers:  # the agent itself asks again in the end
            super().remove_consumer(consumer_id)
            raise OSError("It does not stop.")


@pytest.mark.parametrize(
    ("returned", "reward", "annotations"),
    [
        (None, None, {}),
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        ({}, None, {}),
        ({"reward": 2, "solved": True, "steps": [1, 2]}, 2.0, {"solved": True, "steps": [1, 2]}),
        ({"reward": None, "termination": "limit"}, None, {"termination": "limit"}),
    ],
)
async def test_values_that_a_run_may_return(
    returned: Any, reward: float | None, annotations: Mapping[str, Any]
) -> None:
    async def run(model: Any, task: Any) -> Any:
        await Agent(model=model, callback_handler=None).invoke_async("Hello.")
        return returned

    result = await run_once(policy("sglang", "Yes."), run)
    assert result.failure is None
    assert result.ledger.annotation("reward") == reward
    assert type(result.ledger.annotation("reward")) in (float, type(None))
    assert result.termination == annotations.get("termination", "completed")
    for name, value in annotations.items():
        assert result.ledger.annotation(name) == value


@pytest.mark.parametrize(
    ("returned", "values"),
    [
        (float("nan"), ("AgentError: ", "reward nan", "return a float")),
        ({"reward": float("inf")}, ("AgentError: ", "reward inf")),
        ("good", ("AgentError: ", "reward 'good'")),
        ({"termination": "done"}, ("AgentError: ", "termination 'done'", "completed, truncated")),
        ({"solved": object()}, ("TypeError: ", "solved")),
    ],
)
async def test_an_invalid_return_value_is_a_failure(returned: Any, values: tuple[str, ...]) -> None:
    async def run(model: Any, task: Any) -> Any:
        return returned

    result = await run_once(policy("vllm", "Yes."), run)
    assert result.termination == "tool_error"
    assert result.failure is not None
    assert [value for value in values if value not in result.failure.error] == []


@pytest.mark.parametrize(("returned", "kept"), [(1, 1.0), ("good", None), ({"a": 1}, None), (True, 1.0)])
async def test_a_reward_of_the_runs_own_is_checked_as_a_returned_one(
    returned: Any, kept: float | None, tmp_path: Path
) -> None:
    async def run(model: Any, task: Any) -> None:
        await Agent(model=model, callback_handler=None).invoke_async("Hello.")
        model.ledger.annotate("reward", returned)

    tally = await collect([{"id": "a"}, {"id": "b"}], InProcess(policy("vllm", "Yes."), run), tmp_path)
    if kept is None:
        assert (tally.finished, tally.failed) == (0, 2)
        assert f"The reward {returned!r} is not a finite number" in tally.last_error
        return
    assert (tally.finished, tally.missing) == (2, 0)
    assert [entry.reward for entry in entries(tmp_path)] == [kept, kept]
    assert [ledger.annotation("reward") for ledger in collected(tmp_path)] == [kept, kept]


async def test_bounds_end_a_rollout_that_is_finished() -> None:
    result = await run_once(policy("sglang", "It is ..."), collect_agents.run, sampling={"max_new_tokens": 3})
    assert (result.termination, result.failure, len(result.ledger)) == ("truncated", None, 1)

    async def limited(model: Any, task: Any) -> None:
        agent = Agent(
            model=model,
            tools=[collect_agents.multiply],
            hooks=[LoopLimiter(max_tool_iters=1)],
            callback_handler=None,
        )
        await agent.invoke_async("What is 25 * 17?")

    result = await run_once(policy("sglang", CALL), limited)
    assert (result.termination, result.failure, len(result.ledger)) == ("limit", None, 1)
    result = await run_once(policy("sglang", CALL, max_model_len=300), collect_agents.run, {"question": "word " * 400})
    assert (result.termination, result.failure, len(result.ledger)) == ("context", None, 0)


async def test_the_engines_and_the_agents_errors_are_failures() -> None:
    result = await run_once(policy("sglang", "Yes.", fault=always(Fault(status=500))), collect_agents.run)
    assert result.termination == "engine_error"
    assert result.failure is not None
    assert "ServerError" in result.failure.error + result.failure.traceback

    async def broken(model: Any, task: Any) -> None:
        await Agent(model=model, callback_handler=None).invoke_async("Hello.")
        raise KeyError("answer")

    result = await run_once(policy("sglang", "Yes."), broken)
    assert (result.termination, len(result.ledger)) == ("tool_error", 1)
    assert result.failure is not None
    assert result.failure.error == "KeyError: 'answer'"
    assert 'raise KeyError("answer")' in result.failure.traceback


async def test_an_agent_that_cancels_itself_is_finished() -> None:
    async def ends(model: Any, task: Any) -> float:
        @tool(context=True)
        def multiply(a: int, b: int, tool_context: Any) -> int:
            """Multiply.

            Args:
                a: One.
                b: The other.
                tool_context: Strands' own.
            """
            tool_context.agent.cancel()
            return a * b

        result = await Agent(model=model, tools=[multiply], callback_handler=None).invoke_async("What is 25 * 17?")
        return float(result.stop_reason == "cancelled")

    result = await run_once(policy("vllm", CALL), ends)
    assert (result.failure, result.ledger.annotation("reward")) == (None, 1.0)


async def test_a_second_ledger_in_a_rollout_is_a_failure() -> None:
    async def twice(model: Any, task: Any) -> None:
        for _ in range(2):
            await Agent(model=model, callback_handler=None).invoke_async("Hello.")
            model.reset()
        await Agent(model=model, callback_handler=None).invoke_async("Hello.")

    result = await run_once(policy("vllm", "Yes."), twice)
    assert result.failure is not None
    assert "model.reset()" in result.failure.error

    async def once(model: Any, task: Any) -> None:
        await Agent(model=model, callback_handler=None).invoke_async("Hello.")
        model.reset()

    assert (await run_once(policy("vllm", "Yes."), once)).failure is None


async def test_a_cancelled_rollout_is_aborted_on_the_engine_and_comes_out_as_cancelled() -> None:
    engine = engine_of("sglang", Says("Yes."), latency=60.0)
    on = replace(policy_of("sglang"), backend=backend_of(engine, "sglang"))
    task = asyncio.ensure_future(InProcess(on, collect_agents.run).run(rollout()))
    while not engine.running:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(60):
        while engine.running:
            await asyncio.sleep(0.01)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "termination", "logged"),
    [
        (SystemExit(0), "tool_error", r"AgentError: .*SystemExit\(0\)"),
        (GeneratorExit(0), "tool_error", r"AgentError: .*GeneratorExit\(0\)"),
        (asyncio.CancelledError(), "cancelled", "CancelledError: "),
        (None, "cancelled", "CancelledError: "),
        (Mute(), "tool_error", "Mute: "),
        (ValueError(f"half a character: {chr(0xD83D)}"), "tool_error", r"ValueError: half a character: \\ud83d$"),
    ],
    ids=["exit", "generator exit", "cancelled error", "cancels its own task", "no text", "no UTF-8"],
)
async def test_whatever_the_agents_code_raises_is_a_failure_of_its_rollout(
    error: BaseException | None, termination: str, logged: str, tmp_path: Path
) -> None:
    async def run(model: Any, task: Any) -> float:
        if task["id"] != "b":
            return 1.0
        if error is not None:
            raise error
        own = asyncio.current_task()
        assert own is not None
        own.cancel()
        await asyncio.sleep(60)
        return 0.0

    workers = InProcess(policy("vllm", "Yes."), run)
    tally = await collect([{"id": name} for name in "abc"], workers, tmp_path, concurrency=1)
    assert (tally.finished, tally.failures) == (2, {termination: 1})
    (line,) = map(json.loads, (tmp_path / "failures.jsonl").read_text(encoding="utf-8").splitlines())
    assert (line["task"], line["termination"]) == ("b", termination)
    assert re.match(logged, line["error"])


@by_kind
async def test_rollouts_of_a_group_have_seeds_of_their_own(kind: str) -> None:
    on = policy(kind, "Yes.")
    workers = InProcess(on, collect_agents.run, sampling={"seed": 7})
    one, again, other = [
        (await workers.run(replace(rollout(), sample=sample))).ledger[0].draft.sampling["seed"] for sample in (0, 0, 1)
    ]
    assert one == again != other
    assert 0 <= other < 2**31
    none = (await InProcess(on, collect_agents.run).run(rollout())).ledger[0].draft.sampling["seed"]
    assert none is None


@by_kind
async def test_a_collection_with_failures_on_every_side_is_whole_in_the_end(kind: str, tmp_path: Path) -> None:
    """Real agents, an engine that breaks and an agent that raises: run until everything is there, then confirm it."""
    random.seed(5)

    def says(request: Any) -> Completion:
        draw = random.Random(repr((request.request_id, len(request.prompt_ids))))
        ids = [draw.randrange(300, 40_000) for _ in range(draw.randrange(3, 30))]
        return Completion([*ids, on.tokenizer.eos_token_id])

    engine = engine_of(kind, says, fault=every(7, Fault(status=500)))
    on = replace(policy_of(kind), backend=backend_of(engine, kind, patience_s=0))
    tasks = [{"id": f"task {number}", "question": f"What is {number} * 17?"} for number in range(6)]
    failures = 0
    for _ in range(20):
        tally = await collect(tasks, InProcess(on, collect_agents.flaky), tmp_path, n=4, concurrency=8, max_failures=99)
        failures += tally.failed
        if not tally.missing:
            break
    assert failures > 5
    assert len((tmp_path / "failures.jsonl").read_text().splitlines()) == failures
    found = {(entry.task, entry.sample) for entry in entries(tmp_path)}
    assert found == {(task["id"], sample) for task in tasks for sample in range(4)}
    answers = {answer.request.request_id: answer for one in engine.exchanges for answer in one.answers}
    for ledger in collected(tmp_path):
        assert ledger.annotation("solved") is True
        for turn in ledger:
            answer = answers[turn.draft.engine.request_id]
            assert answer.output_ids == tuple(turn.draft.output_ids.tolist())
    patient = backend_of(engine, kind)  # every seventh request still fails, and this one may be the seventh
    await asyncio.gather(*(rescore(ledger, patient) for ledger in list(collected(tmp_path))[:1]))


def test_an_agent_is_named_by_module_and_function() -> None:
    folder = Path(collect_agents.__file__).parent
    assert AgentCode.of("collect_agents:run", folder).is_run
    assert not AgentCode.of("collect_agents:factory", folder).is_run
    assert AgentCode.of(partial(collect_agents.run)).is_run

    class Callable:
        async def __call__(self, model: Any, task: Any) -> None:
            """Run."""

    assert AgentCode.of(Callable()).is_run


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("support.collect_agents", "'support.collect_agents'.*module:function"),
        (":run", "':run'.*module:function"),
        ("no_such_module:run", "'no_such_module'.*PYTHONPATH"),
        ("support.no_such_module:run", "'support.no_such_module'.*PYTHONPATH"),
        ("support.collect_agents:walk", "'support.collect_agents' has no 'walk'"),
        ("support.collect_agents:__doc__", "type str"),
        ("exiting_agents:run", r"'exiting_agents' raised SystemExit\(0\)"),
    ],
)
def test_a_wrong_agent_name_raises(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "exiting_agents.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "lacking_agents.py").write_text("import no_such_package\n")
    with pytest.raises(AgentError, match=message):
        AgentCode.of(name, tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):  # the module is there and has its own error
        AgentCode.of("lacking_agents:run", tmp_path)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model, task: None, ["returned None", "Return a Strands Agent"]),
        (lambda model, task: "text", ["returned 'text'", "Return a Strands Agent"]),
        (lambda model, task: collect_agents.run(model, task), ["`async def run(model, task)`"]),
    ],
    ids=["nothing", "text", "coroutine"],
)
async def test_a_factory_that_makes_no_agent_is_a_failure(make: Any, said: list[str]) -> None:
    result = await run_once(policy("vllm", "Yes."), make)
    assert result.failure is not None
    assert [words for words in said if words not in result.failure.error] == []


def test_a_policy_with_a_store_is_refused(tmp_path: Path) -> None:
    with LedgerFile(tmp_path / "a.tito", "a") as file, pytest.raises(ValueError, match="without one"):
        InProcess(replace(policy_of("vllm"), store=file), collect_agents.run)


def test_a_bad_choice_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="temperature"):
        InProcess(policy_of("vllm"), collect_agents.run, sampling={"temprature": 1.0})
