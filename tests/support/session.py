"""Run an agent with a session, in this process or in a new one: `python -m support.session SPEC` prints the result."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from strands import Agent, tool
from strands.session.file_session_manager import FileSessionManager
from strands.types._snapshot import Snapshot

from support.scripted import Says, backend_of, engine_of, policy_of
from tito_core import TITOModel
from tito_core.ledger import Ledger, check_ledger
from tito_core.store import LedgerFile

TESTS = Path(__file__).parent.parent


@tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


@dataclass
class Life:
    """One run of a session's agents.

    Attributes:
        kind: The backend.
        questions: The user messages, one for each invocation.
        answers: The policy's answers.
        sessions: Folder of the session, or None.
        store: The ledger file, or None.
        snapshot: File of a snapshot to start from, or None.
        uuid: The first ledger's uuid, or None for a random one.
        agents: The session's agents, invoked in turn on one model.
    """

    kind: str
    questions: list[str]
    answers: list[str]
    sessions: str | None = None
    store: str | None = None
    snapshot: str | None = None
    uuid: str | None = None
    agents: list[str] = field(default_factory=lambda: ["default"])


@dataclass
class Lived:
    """The result of a life.

    Attributes:
        ledger: The uuid of the model's ledger.
        turns: For each turn: parent, branch reason, the turn that it branches from, its own prompt and output ids.
        prompts: The prompts that the engine got in this life.
        calls: Tool-call ids in the first agent's messages.
        texts: The last message of each invocation.
    """

    ledger: str
    turns: list[dict[str, Any]]
    prompts: list[list[int]]
    calls: list[str]
    texts: list[str]


async def live(life: Life) -> tuple[Lived, TITOModel, list[Agent]]:
    """Run a life in this process."""
    script = Says(*life.answers)
    engine = engine_of(life.kind, script)
    store = LedgerFile(life.store, "a") if life.store else None
    policy = replace(policy_of(life.kind), backend=backend_of(engine, life.kind), store=store)
    model = policy.model(ledger=Ledger(life.uuid) if life.uuid else None)
    agents = [agent_of(model, life, name) for name in life.agents]
    texts = []
    for number, question in enumerate(life.questions):
        result = await agents[number % len(agents)].invoke_async(question)
        texts.append(str(result).strip())
    check_ledger(model.ledger)
    calls = [b["toolUse"]["toolUseId"] for m in agents[0].messages for b in m["content"] if "toolUse" in b]
    turns = [_turn(turn) for turn in model.ledger]
    if store is not None:
        store.close()
    return Lived(model.ledger.uuid, turns, [list(r.prompt_ids) for r in script.requests], calls, texts), model, agents


def live_elsewhere(life: Life) -> Lived:
    """Run a life in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "support.session", json.dumps(asdict(life))],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Lived(**json.loads(done.stdout.splitlines()[-1]))


def agent_of(model: TITOModel, life: Life, name: str) -> Agent:
    """Return one of a life's agents, restored from its session or snapshot if it has one."""
    sessions = FileSessionManager("s", life.sessions) if life.sessions else None
    agent = Agent(
        model=model,
        tools=[add],
        agent_id=name,
        system_prompt="Be brief.",
        callback_handler=None,
        session_manager=sessions,
    )
    if life.snapshot:
        agent.load_snapshot(Snapshot.from_dict(json.loads(Path(life.snapshot).read_text())))
    return agent


def _turn(turn: Any) -> dict[str, Any]:
    branch = turn.draft.branch
    return {
        "parent": turn.parent,
        "reason": None if branch is None else branch.reason.value,
        "from": None if branch is None else branch.turn,
        "prompt": turn.draft.prompt_ids.tolist(),
        "output": turn.draft.output_ids.tolist(),
    }


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(live(Life(**json.loads(sys.argv[1]))))[0])))
