"""On-policy training of an agent with a tool on a CPU: an engine samples, torch learns, the engine loads the weights.

python examples/train_tiny.py --backend vllm
python examples/train_tiny.py --backend sglang --updates 3

The learner takes the ids, loss mask and logprobs of the rollouts unchanged. The running engine loads the new weights
under a new version, which the ledger records for every sampled token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tito_engines as engines
from strands_tito import Ledger, Policy
from strands_tito.errors import TITOError
from tito_core.backend import EngineAdmin
from tito_engines import install, models
from training import batch, curves
from training.process import LearnerProcess
from training.task import Problem, attempt, problems

console = Console(width=None if sys.stdout.isatty() else 118)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run.

    Attributes:
        updates: Number of updates; each uses a new batch of rollouts.
        minutes: No update starts after this time.
        questions, copies: Groups per batch, and rollouts per group, whose rewards are compared.
        held_out: Questions for evaluation before and after the training; never trained on.
        layers, lr, passes, clip: See `learner.Learner`.
    """

    updates: int = 14
    minutes: float = 30.0
    questions: int = 4
    copies: int = 4
    held_out: int = 24
    layers: int = 6
    lr: float = 5e-5
    passes: int = 2
    clip: tuple[float, float] = (0.2, 0.28)

    def learner(self) -> dict[str, Any]:
        """Return the learner's settings."""
        return {name: getattr(self, name) for name in ("layers", "lr", "passes", "clip")}


@dataclass(slots=True)
class Run:
    """Results of a run: figures of each update, the learner's check of the logprobs, and the held-out rewards."""

    backend: str
    engine: str
    settings: dict[str, Any]
    updates: list[dict[str, Any]] = field(default_factory=list)
    proof: dict[str, Any] = field(default_factory=dict)
    before: float = float("nan")
    after: float = float("nan")
    seconds: float = 0.0


class Training:
    """One run: a policy on an engine, a learner with the same weights, and a folder to exchange files."""

    def __init__(self, policy: Policy, learner: LearnerProcess, folder: Path, settings: Settings) -> None:
        if not isinstance(policy.backend, EngineAdmin):
            raise TypeError(f"The backend {policy.info.backend} cannot change its server's weights: use another one.")
        self.policy, self.admin, self.learner = policy, policy.backend, learner
        self.folder, self.settings = folder, settings
        self.untrained: list[Ledger] = []
        self.run = Run(policy.info.backend, f"{policy.info.backend} {policy.info.version}", asdict(settings))

    async def train(self, progress: Progress) -> Run:
        """Repeat: run rollouts, update the weights, load them. Return the results."""
        began = time.monotonic()
        bar = progress.add_task("held-out questions", total=self.settings.updates)
        self.untrained = await self._held_out()
        self.run.before = mean_reward(self.untrained)
        for step in range(self.settings.updates):
            if time.monotonic() - began > 60 * self.settings.minutes:
                break
            progress.update(bar, description=f"update {step + 1}")
            figures = await self._update(step, progress)
            progress.advance(bar)
            progress.console.print(curves.line(figures), highlight=False)
            self.run.seconds = time.monotonic() - began
        progress.update(bar, description="held-out questions")
        self.run.after = mean_reward(await self._held_out())
        self.run.seconds = time.monotonic() - began
        return self.run

    async def _update(self, step: int, progress: Progress) -> dict[str, Any]:
        began, version = time.monotonic(), await self.admin.weight_version()
        ledgers = await self._run_rollouts(problems(self.settings.questions, seed=step), self.settings.copies)
        rolled_out = time.monotonic()
        rows, again = batch.rows_of(ledgers), batch.retokenized(ledgers, self.policy.tokenizer)
        path = batch.write(rows, self.folder / "batch.npz")
        if not self.run.proof:
            self.run.proof = await self._prove([*self.untrained, *ledgers])
            progress.console.print("\n".join(curves.proof_lines(self.run.proof)), highlight=False)
        stats = await asyncio.to_thread(self.learner.ask, "update", batch=path)
        weights = str(self.folder / f"weights-{step % 2}")  # the engine loads one folder while the other is written
        await asyncio.to_thread(self.learner.ask, "save", folder=weights)
        await self.admin.load_weights(weights, f"step-{step + 1}")
        figures = {
            "update": step + 1,
            "version": version,
            "sampled_by": sampled_by(ledgers),
            "reward": mean_reward(ledgers),
            "sampled": int(sum(row.mask.sum() for row in rows)),
            "samples": len(rows),
            "retokenizing_changes": batch.changed(rows, again),
            "rollout_s": rolled_out - began,
            "seconds": time.monotonic() - began,
            **stats,
        }
        self.run.updates.append(figures)
        return figures

    async def _prove(self, ledgers: Sequence[Ledger]) -> dict[str, Any]:
        """Compare the recorded logprobs with the learner's, on the sampled ids and on the ids of re-tokenized text."""
        rows, again = batch.rows_of(ledgers), batch.retokenized(ledgers, self.policy.tokenizer)
        proof: dict[str, Any] = {"samples": len(rows), "retokenizing_changes": batch.changed(rows, again)}
        for name, columns in (("ours", rows), ("retokenized", again)):
            path, into = batch.write(columns, self.folder / "proof.npz"), self.folder / "scores.npy"
            await asyncio.to_thread(self.learner.ask, "score", batch=path, into=str(into))
            apart = batch.recorded(columns) - np.load(into)
            ratio = np.exp(-apart.astype(np.float64))
            proof[name] = {
                "tokens": len(apart),
                "max": float(np.abs(apart).max()),
                "p99": float(np.quantile(np.abs(apart), 0.99)),
                "ratio": [float(ratio.min()), float(ratio.mean()), float(ratio.max())],
            }
        return proof

    async def _held_out(self) -> list[Ledger]:
        return await self._run_rollouts(problems(self.settings.held_out, seed=10**6), copies=1)

    async def _run_rollouts(self, batch_problems: Sequence[Problem], copies: int) -> list[Ledger]:
        slots = asyncio.Semaphore(16)

        async def one(number: int, problem: Problem) -> Ledger:
            async with slots:
                return await attempt(self.policy, problem, group=str(number))

        return await asyncio.gather(*(one(*numbered) for numbered in enumerate(batch_problems) for _ in range(copies)))


def mean_reward(ledgers: Sequence[Ledger]) -> float:
    """Return the mean reward; NaN without rollouts."""
    return float(np.mean([ledger.annotation("reward") for ledger in ledgers])) if ledgers else float("nan")


def sampled_by(ledgers: Sequence[Ledger]) -> list[str | None]:
    """Return the weight versions of the sampled tokens."""
    return sorted(
        {span.version for ledger in ledgers for turn in ledger for span in turn.draft.engine.versions}, key=str
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="vllm", choices=("vllm", "sglang"))
    parser.add_argument("--updates", type=int, default=defaults.updates)
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="no update starts after this time")
    parser.add_argument("--questions", type=int, default=defaults.questions, help="groups in a batch")
    parser.add_argument("--copies", type=int, default=defaults.copies, help="rollouts in a group")
    parser.add_argument("--layers", type=int, default=defaults.layers, help="number of last layers to train")
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument("--passes", type=int, default=defaults.passes, help="optimizer steps on each batch")
    parser.add_argument("--torch-index", default=None, help="package index with CPU builds of torch, if pip needs one")
    parser.add_argument(
        "--page", default="runs/training.md", help="page for the table; figures and plot go into the same folder"
    )
    return parser.parse_args()


def main() -> int:
    """Start the engine and the learner, train and draw. Expected errors are printed without a traceback."""
    logging.getLogger("strands.tools").setLevel(logging.CRITICAL)  # the policy makes many malformed calls at first
    arguments = parse_arguments()
    chosen = {name: value for name, value in vars(arguments).items() if name in Settings.__slots__}
    settings = Settings(**chosen)
    try:
        with contextlib.ExitStack() as stack:
            with engines.on_console() as show_progress:
                options = {"torch_index": arguments.torch_index, "timeout_s": 900.0, "on_progress": show_progress}
                started = engines.running_sync(arguments.backend, dev_mode=True, **options)
                url = stack.enter_context(started)
            python = install.ensure(engines.find(arguments.backend)).python
            model = models.ensure("smollm2", python)
            tokenizer = models.load_tokenizer("smollm2")
            policy = Policy.connect(backend=arguments.backend, base_url=url, tokenizer=tokenizer)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="train-tiny-")))
            learner = stack.enter_context(LearnerProcess(python, model, settings.learner(), folder / "learner.log"))
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            progress = stack.enter_context(Progress(*columns, console=console))
            training = Training(policy, learner, folder, settings)
            with contextlib.suppress(KeyboardInterrupt):  # show the results so far
                asyncio.run(training.train(progress))
    except TITOError as error:
        console.print(f"[red]{type(error).__name__}[/]: {error}", highlight=False, markup=True)
        return 1
    if training.run.updates:
        curves.show(console, training.run)
        curves.keep(training.run, Path(arguments.page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
