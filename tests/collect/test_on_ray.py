"""Rollouts that a cluster loses are run again. `real/ray_check.py` runs Ray itself; here are only its error names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from strands_tito.collect import InProcess, OnRay, Rollout, RolloutResult, Tasks
from strands_tito.collect.actors import ActorResult, RolloutActor
from strands_tito.collect.rollout import AgentCode
from support import collect_agents
from support.drafts import make_draft
from support.scripted import Says, backend_of, engine_of, policy_of
from support.trainer_packages import run
from tito_core import Policy, store
from tito_core.backend import EngineConnectionError
from tito_core.ledger import Ledger, check_ledger
from tito_core.store import records
from tito_core.termination import Termination

LOSSES = ("RayActorError", "ObjectLostError", "NodeDiedError", "OutOfMemoryError", "WorkerCrashedError")
ERRORS = {name: type(name, (Exception,), {}) for name in (*LOSSES, "RayTaskError", "RaySystemError")}


class Actor:
    """Raises or answers in the given order."""

    def __init__(self, *fates: str) -> None:
        self.fates = list(fates)
        self.run = SimpleNamespace(remote=self._run)

    async def _run(self, rollout: Rollout) -> ActorResult:
        fate = self.fates.pop(0)
        if fate:
            raise ERRORS[fate]("gone")
        return ActorResult(store.encode(Ledger(task_id=rollout.task.id)), "completed", None)


def on_ray(*actors: Actor) -> OnRay:
    ray = SimpleNamespace(exceptions=SimpleNamespace(**ERRORS))
    workers = OnRay(ray, AgentCode.of(collect_agents.run), is_ours=False)
    workers._actors = list(actors)
    workers._expect(len(actors))
    return workers


def rollout() -> Rollout:
    (task,) = Tasks.of([{"id": "math-1"}])
    return Rollout("0d3e2a44-9d63-4f10-8a53-0f8f8d1f8a10", task, 0)


@pytest.mark.parametrize("loss", LOSSES)
async def test_what_went_with_an_actor_or_its_machine_is_run_on_another(loss: str) -> None:
    first, second = Actor(loss), Actor("")
    workers = on_ray(first, second)
    ended = await workers.run(rollout())
    assert (ended.termination, ended.failure, ended.ledger.header.task_id) == (Termination.COMPLETED, None, "math-1")
    assert (first.fates, second.fates, workers._running) == ([], [], [0, 0])


async def test_what_is_lost_again_and_again_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_tito.collect.actors.RESTART_S", 0.0)
    workers = on_ray(Actor(*LOSSES))
    ended = await workers.run(rollout())
    assert ended.termination is Termination.ABORTED
    assert ended.failure is not None
    assert "lost 5 times" in ended.failure.error
    assert ended.failure.error.endswith("gone")


async def test_another_error_of_the_cluster_is_raised() -> None:
    workers = on_ray(Actor("RaySystemError", ""))
    with pytest.raises(ERRORS["RaySystemError"]):
        await workers.run(rollout())
    assert workers._running == [0]


@pytest.fixture
def _usual_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor has a process of its own, whose garbage collector it sets; here other tests come after it."""
    monkeypatch.setattr("strands_tito.collect.actors.tune_gc", lambda: None)


class Hiccup:
    """A server that does not answer the first time."""

    def __init__(self) -> None:
        self.connects = 0

    async def connect(self) -> Policy:
        self.connects += 1
        if self.connects == 1:
            raise EngineConnectionError("Nothing answers.", backend="vllm")
        return replace(policy_of("vllm"), backend=backend_of(engine_of("vllm", Says("Yes.")), "vllm"))


@pytest.mark.usefixtures("_usual_rounds")
async def test_an_actor_that_was_started_again_connects_when_the_server_answers() -> None:
    """If the server does not answer the first rollout, only that rollout fails."""
    server = Hiccup()
    actor = RolloutActor(cast(Any, server), "collect_agents:run", Path(collect_agents.__file__).parent, {})
    first = await actor.run(rollout())
    assert first.failure is not None
    assert first.termination == "engine_error"
    assert first.failure.error == "EngineConnectionError: Nothing answers."
    again = await actor.run(rollout())
    assert (again.termination, again.failure, server.connects) == ("completed", None, 2)
    await actor.run(rollout())
    assert server.connects == 2
    await actor.aclose()


async def test_an_actor_that_never_connected_is_closed_quietly() -> None:
    actor = RolloutActor(cast(Any, Hiccup()), "collect_agents:run", Path(collect_agents.__file__).parent, {})
    await actor.aclose()
    with pytest.raises(EngineConnectionError):
        await actor.connect()
    await actor.aclose()


async def test_what_a_thread_adds_while_an_actor_encodes_its_rollout_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, turn_record = Ledger(), records.turn_record
    ledger.commit(make_draft(None, 0, [100], [200]))

    async def ended(self: InProcess, rollout: Rollout) -> RolloutResult:
        return RolloutResult(rollout, ledger, Termination.COMPLETED)

    def turn_record_while_an_agent_is_late(*turn: Any, **options: Any) -> Any:
        late = ledger.commit(make_draft(0, 2, [100], [200]))
        ledger.annotate("reward", 1.0, turn=late.index)
        return turn_record(*turn, **options)

    monkeypatch.setattr(InProcess, "run", ended)
    monkeypatch.setattr(records, "turn_record", turn_record_while_an_agent_is_late)
    server = Hiccup()
    server.connects = 1
    actor = RolloutActor(cast(Any, server), "collect_agents:run", Path(collect_agents.__file__).parent, {})
    sent = store.from_record(msgspec.msgpack.decode((await actor.run(rollout())).ledger))
    await actor.aclose()
    assert (len(sent), len(sent.annotations), len(ledger)) == (1, 0, 2)
    check_ledger(sent)


SCRIPT = Path(__file__).parent / "real" / "ray_check.py"


@pytest.mark.trainers
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("killed", "160 rollouts of"),
        ("lost", "160 rollouts after a lost actor"),
        ("errors", "of 50 when it was cancelled, nothing left on the engine"),
    ],
)
def test_a_cluster_loses_and_repeats_nothing(part: str, message: str, kind: str, tmp_path: Path) -> None:
    assert message in run(str(SCRIPT), "ray-2.50.0", part, kind, str(tmp_path))
