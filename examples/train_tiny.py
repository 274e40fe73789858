"""On-policy training of an agent with a tool on a CPU: an engine samples, torch learns, the engine loads the weights.

python examples/train_tiny.py --backend vllm
python examples/train_tiny.py --backend sglang --updates 3
python examples/train_tiny.py --lora
python examples/train_tiny.py --distil

The learner takes the ids, loss mask and logprobs of the rollouts unchanged. The running engine loads the new weights
under a new version, which the ledger records for every sampled token. With --lora it trains an adapter, and the engine
loads each version under a new name. With --distil it trains a model with fewer layers to be as the whole one, which the
other engine serves: its logprobs for the recorded ids take the place of rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tito_engines as engines
from strands_tito import Adapter, Ledger, Policy
from strands_tito.errors import TITOError
from strands_tito.inspect.teacher import Teacher
from tito_core.backend import EngineAdmin
from tito_engines import install, models
from training import batch, curves
from training.process import LearnerProcess, peft_folder
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
        layers, lr, passes, clip, rank, dropped: See `learner.Learner`. A dropped layer makes a run a distillation.
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
    rank: int = 0
    dropped: tuple[int, ...] = ()

    def learner(self) -> dict[str, Any]:
        """Return the learner's settings."""
        return {name: getattr(self, name) for name in ("layers", "lr", "passes", "clip", "rank", "dropped")}


@dataclass(slots=True)
class Run:
    """Results of a run: figures of each update, the learner's check of the logprobs, and those of held-out questions.

    `reverse_kl` has KL(student || teacher) on held-out questions, in nats a token, before and after.
    """

    name: str
    engine: str
    settings: dict[str, Any]
    updates: list[dict[str, Any]] = field(default_factory=list)
    proof: dict[str, Any] = field(default_factory=dict)
    before: float = float("nan")
    after: float = float("nan")
    reverse_kl: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Training:
    """One run: a policy on an engine, a learner with the same weights, and a folder to exchange files.

    With a teacher, its logprobs of the sampled tokens are what is learned, and not the rewards.
    """

    def __init__(
        self,
        policy: Policy,
        learner: LearnerProcess,
        folder: Path,
        settings: Settings,
        teacher: Teacher | None = None,
    ) -> None:
        if not isinstance(policy.backend, EngineAdmin):
            raise TypeError(f"The backend {policy.info.backend} cannot change its server's weights: use another one.")
        self.policy, self.admin, self.learner = policy, policy.backend, learner
        self.folder, self.settings = folder, settings
        self.scores, self.teacher = folder / "scores.npy", teacher
        self.adapter: Adapter | None = None
        self.untrained: list[Ledger] = []
        kind = ", LoRA" if settings.rank else ", taught" if teacher else ""
        by = f" by {teacher.info.backend} {teacher.info.version}" if teacher else ""
        engine = f"{policy.info.backend} {policy.info.version}{kind}{by}"
        self.run = Run(policy.info.backend + kind, engine, asdict(settings))

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
        rows, again = await self._rows(ledgers), batch.retokenized(ledgers, self.policy.tokenizer)
        if not self.run.proof:
            self.run.proof = await self._prove([*self.untrained, *ledgers])
            progress.console.print("\n".join(curves.proof_lines(self.run.proof)), highlight=False)
        await self._ask("score", again)
        retokenized = batch.mismatch(again, self.scores, shown=())  # its tokens have no place in the answer
        stats = await self._ask("update", rows)
        await self._load(step, is_changed=stats["norm"] > 0)
        figures = {
            "update": step + 1,
            "version": version,
            "sampled_by": sampled_by(ledgers),
            "reward": mean_reward(ledgers),
            "sampled": int(sum(row.mask.sum() for row in rows)),
            "samples": len(rows),
            "retokenizing_changes": batch.changed(rows, again),
            "mismatch": {"ours": batch.mismatch(rows, self.scores), "retokenized": retokenized},
            "rollout_s": rolled_out - began,
            "seconds": time.monotonic() - began,
            **({"reverse_kl": batch.reverse_kl(rows)} if self.teacher else {}),
            **stats,
        }
        self.run.updates.append(figures)
        return figures

    async def _rows(self, ledgers: Sequence[Ledger]) -> list[batch.Row]:
        """Return the rows to learn from; a teacher scores the recorded ids of each."""
        if self.teacher is None:
            return batch.rows_of(ledgers)
        paths = [trajectory for ledger in ledgers for trajectory in ledger.trajectories]
        scores = await asyncio.gather(*map(self.teacher.score, paths))
        return batch.rows_of(ledgers, [each.logprobs for each in scores])

    async def _ask(self, do: str, rows: Sequence[batch.Row]) -> dict[str, Any]:
        """Give the learner rows; it writes their logprobs to `scores`."""
        path = batch.write(rows, self.folder / "batch.npz")
        return await asyncio.to_thread(self.learner.ask, do, batch=path, into=str(self.scores))

    async def _load(self, step: int, *, is_changed: bool) -> None:
        """Let the engine load what was learned: as its weights, or as an adapter that takes the last one's place."""
        folder = str(self.folder / f"weights-{step % 2}")  # the engine loads one folder while the other is written
        await asyncio.to_thread(self.learner.ask, "save", folder=folder)
        if not self.settings.rank:
            return await self.admin.load_weights(folder, f"step-{step + 1}")
        before, self.adapter = self.adapter, Adapter(f"step-{step + 1}", fresh=not is_changed)
        await self.admin.load_adapter(self.adapter.name, folder)
        if before:
            await self.admin.unload_adapter(before.name)

    async def _prove(self, ledgers: Sequence[Ledger]) -> dict[str, Any]:
        """Compare the recorded logprobs with the learner's, on the sampled ids and on the ids of re-tokenized text."""
        rows, again = batch.rows_of(ledgers), batch.retokenized(ledgers, self.policy.tokenizer)
        proof: dict[str, Any] = {"samples": len(rows), "retokenizing_changes": batch.changed(rows, again)}
        for name, columns in (("ours", rows), ("retokenized", again)):
            await self._ask("score", columns)
            apart = batch.trained(columns, "logprobs") - np.load(self.scores)
            ratio = np.exp(-apart.astype(np.float64))
            proof[name] = {
                "tokens": len(apart),
                "max": float(np.abs(apart).max()),
                "p99": float(np.quantile(np.abs(apart), 0.99)),
                "ratio": [float(ratio.min()), float(ratio.mean()), float(ratio.max())],
            }
        return proof

    async def _held_out(self) -> list[Ledger]:
        ledgers = await self._run_rollouts(problems(self.settings.held_out, seed=10**6), copies=1)
        if self.teacher:
            self.run.reverse_kl.append(batch.reverse_kl(await self._rows(ledgers)))
        return ledgers

    async def _run_rollouts(self, batch_problems: Sequence[Problem], copies: int) -> list[Ledger]:
        slots = asyncio.Semaphore(16)

        async def one(number: int, problem: Problem) -> Ledger:
            async with slots:
                return await attempt(self.policy, problem, group=str(number), adapter=self.adapter)

        return await asyncio.gather(*(one(*numbered) for numbered in enumerate(batch_problems) for _ in range(copies)))


def mean_reward(ledgers: Sequence[Ledger]) -> float:
    """Return the mean reward; NaN without rollouts."""
    return float(np.mean([ledger.annotation("reward") for ledger in ledgers])) if ledgers else float("nan")


def sampled_by(ledgers: Sequence[Ledger]) -> list[str | None]:
    """Return the weight versions of the sampled tokens, which name the adapter too."""
    return sorted({span.version for ledger in ledgers for turn in ledger for span in turn.draft.versions}, key=str)


GRPO = Settings()
LORA = replace(GRPO, rank=8, lr=5e-4)
DISTIL = replace(GRPO, dropped=(4, 5, 7, 25), layers=12)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="vllm", choices=("vllm", "sglang"))
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--lora", dest="base", action="store_const", const=LORA, help="train a LoRA adapter")
    kinds.add_argument("--distil", dest="base", action="store_const", const=DISTIL, help="learn from a larger model")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--minutes", type=float, help="no update starts after this time")
    parser.add_argument("--questions", type=int, help="groups in a batch")
    parser.add_argument("--copies", type=int, help="rollouts in a group")
    parser.add_argument("--layers", type=int, help="number of last layers to train")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--passes", type=int, help="optimizer steps on each batch")
    parser.add_argument("--torch-index", default=None, help="package index with CPU builds of torch, if pip needs one")
    parser.add_argument(
        "--page", default="runs/training.md", help="page for the table; figures and plot go into the same folder"
    )
    parser.set_defaults(base=GRPO)
    arguments = parser.parse_args()
    if arguments.base.rank and arguments.backend != "vllm":
        parser.error(f"--lora needs --backend vllm, not {arguments.backend}: LoRA on SGLang has not run on a CPU.")
    return arguments


def serve(backend: str, settings: Settings, **options: Any) -> contextlib.AbstractContextManager[str]:
    """Start an engine whose weights can be changed, or that takes the adapters of a run."""
    spec = engines.find(backend)
    if settings.rank:
        # vLLM keeps unloaded adapters in its slots, and on a CPU treats the last one as that of requests without any.
        env, slots = spec.env, str(settings.updates + 1)
        options["server_args"] = ("--enable-lora", "--max-loras", slots, "--lora-target-modules", *LINEAR)
        spec = replace(spec, env=lambda launch: {**env(launch), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})
    return engines.running_sync(spec, dev_mode=True, timeout_s=900.0, **options)


def prepare(arguments: argparse.Namespace, settings: Settings, stack: contextlib.ExitStack) -> Training:
    """Start the learner, the engine, and for a distillation the other engine with the whole model."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="train-tiny-")))
    with engines.on_console() as progress:
        spec = engines.find(arguments.backend)
        python = install.ensure(spec, torch_index=arguments.torch_index, progress=progress).python
        model, served = models.ensure("smollm2", python, progress=progress), "smollm2"
        path = peft_folder(python) if settings.rank else ""
        learner = stack.enter_context(LearnerProcess(python, model, settings.learner(), folder / "learner.log", path))
        if settings.dropped:
            served = str(shutil.copytree(models.ensure_tokenizer("smollm2"), folder / "student"))
            learner.ask("save", folder=served)
        options = {"torch_index": arguments.torch_index, "on_progress": progress}
        url = stack.enter_context(serve(arguments.backend, settings, model=served, **options))
        tokenizer, teacher = models.load_tokenizer("smollm2"), None
        policy = Policy.connect(backend=arguments.backend, base_url=url, tokenizer=tokenizer)
        if settings.dropped:
            other = "sglang" if arguments.backend == "vllm" else "vllm"
            url = stack.enter_context(serve(other, GRPO, **options))
            teacher = asyncio.run(Teacher.connect(backend=other, base_url=url, tokenizer=tokenizer))
    return Training(policy, learner, folder, settings, teacher)


def main() -> int:
    """Train and draw. Expected errors are printed without a traceback."""
    logging.getLogger("strands.tools").setLevel(logging.CRITICAL)  # the policy makes many malformed calls at first
    arguments = parse_arguments()
    given = {name: value for name, value in vars(arguments).items() if name in Settings.__slots__ and value is not None}
    settings = replace(arguments.base, **given)
    try:
        with contextlib.ExitStack() as stack:
            training = prepare(arguments, settings, stack)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            progress = stack.enter_context(Progress(*columns, console=console))
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
