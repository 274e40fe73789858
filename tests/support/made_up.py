"""Results of rollouts with made-up turns, without an agent."""

from __future__ import annotations

import random
from pathlib import Path
from uuid import UUID

from fuzz.plain_file import END, PlainFrame
from strands_tito.collect import Entry, Failure, Rollout, RolloutResult
from support.drafts import make_draft
from tito_core.ledger import Ledger
from tito_core.termination import Termination, record_termination


def add_ends(folder: Path, count: int) -> None:
    """Add END records to a folder with one rollout, for a list that reads nothing else, until it has `count`."""
    with (folder / "rollouts-00001.tito").open("ab") as file:
        for n in range(1, count):
            facts = Entry(f"sum-{n // 8}", n % 8, f"{n // 8:016x}", "completed", 1, 3, 1, n % 3 / 2)
            file.write(PlainFrame(END, UUID(int=n, version=4).bytes, facts.record()).written())


def made_up_result(rollout: Rollout, failure: str | None = None) -> RolloutResult:
    """Return a result with up to three turns, always the same for a task and sample."""
    dice = random.Random(f"{rollout.task.id} {rollout.sample}")
    ledger = Ledger(group_id=rollout.group_id, task_id=rollout.task.id, user=rollout.user)
    for turn in range(dice.randrange(4)):
        parent = turn - 1 if turn else None
        prompt, output = ([base] * dice.randint(1, 40) for base in (100 + turn, 200 + turn))
        ledger.commit(make_draft(parent, ledger.path_length(parent), prompt, output))
    if dice.random() < 0.7:
        ledger.annotate("reward", dice.random())
    termination = Termination.ENGINE_ERROR if failure else Termination.COMPLETED
    record_termination(ledger, termination)
    return RolloutResult(rollout, ledger, termination, Failure(failure, "") if failure else None)
