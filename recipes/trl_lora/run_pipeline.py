"""Agent tuning from nothing to curves: evaluate, train a LoRA adapter by GRPO, load it into the engine, evaluate again.

python run_pipeline.py --tiny    # the whole pipeline on a CPU: SmolLM2-135M on a real vLLM, a few updates
python run_pipeline.py           # on two GPUs: TRL's server mode, the loss corrected by the recorded logprobs
python run_pipeline.py --gpus 0  # on one GPU, which the trainer and the server share; weights pass through a folder

The agent solves arithmetic with a calculator that takes one operation at a time. The folder `--out` receives the
adapter, report.json and curves.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import logging
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.scripts.vllm_serve import ScriptArguments, build_command

from calculator_agent import Agents, problems, prompt_of, question_of
from calculator_harness import HarnessAgents
from strands_tito import Ledger, Policy
from strands_tito.integrations.run_rollout import run_rollout
from strands_tito.integrations.trl import recorded_reward, rollout_func
from tito_core.policy import run_blocking


@dataclass(frozen=True)
class Settings:
    """Settings of a run; the defaults are for two GPUs.

    Attributes:
        model: Hub id, folder, or a name of `tito_engines.models`.
        operations: Operations of a problem, each of which takes a call.
        train, held_out: Problems to train on, and problems for the evaluations, which are never trained on.
        updates: Optimizer steps; each uses `batch` rollouts, `micro` at a time, in groups of `copies` of one problem.
        tokens: Most tokens of one answer.
        lr, rank: Learning rate and rank of the adapter.
    """

    model: str = "Qwen/Qwen2.5-1.5B-Instruct"
    operations: int = 4
    train: int = 2000
    held_out: int = 200
    updates: int = 100
    batch: int = 64
    micro: int = 4
    copies: int = 8
    tokens: int = 512
    lr: float = 2e-5
    rank: int = 32


TINY = Settings(
    "smollm2", operations=1, train=64, held_out=24, updates=4, batch=8, copies=4, tokens=40, lr=2e-4, rank=16
)


async def evaluate(policy: Policy, agents: Agents, held_out: Sequence[str], tokens: int) -> dict[str, float]:
    """Answer every held-out problem once, sampled as in the training; return the mean scores."""
    slots = asyncio.Semaphore(16)

    async def one(question: str) -> Ledger:
        async with slots:
            model = policy.model(sampling={"temperature": 1.0, "max_new_tokens": tokens}, malformed_calls="end_turn")
            prompt = prompt_of(question)
            return (await run_rollout(agents.make(model, prompt), model, prompt)).ledger

    try:
        ledgers = await asyncio.gather(*map(one, held_out))
    finally:
        await policy.aclose()  # this event loop ends here
    names = {"right": "reward", "tool_use": "tool_use"}
    return {name: sum(each.annotation(key) for each in ledgers) / len(ledgers) for name, key in names.items()}


@dataclass
class Rollouts:
    """The trainer's `rollout_func`: loads the weights first where TRL does not, and looks at what was sampled.

    Attributes:
        loads: Whether to load the merged weights into the engine after each step; TRL's server mode does it itself.
        updates: For each batch: versions of the weights that sampled it, tokens trained, the largest difference of
            recorded logprobs and the trainer's own over one rollout, and seconds.
    """

    policy: Policy
    agents: Agents
    held_out: frozenset[str]
    folder: Path
    loads: bool
    updates: list[dict[str, Any]] = field(default_factory=list)
    loaded: int = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return TRL's columns for the prompts.

        Raises:
            ValueError: A prompt is a held-out problem.
        """
        began = time.monotonic()
        if seen := self.held_out & {question_of(prompt) for prompt in prompts}:
            raise ValueError(f"Held-out problems would be trained: {sorted(seen)[:3]}.")
        if self.loads and trainer.state.global_step != self.loaded:
            self.loaded = trainer.state.global_step
            load_merged(trainer, self.policy, self.folder)
        self.agents.ledgers.clear()
        columns = rollout_func(self.agents.make, self.policy, malformed_calls="end_turn")(prompts, trainer)
        turns = [turn for ledger in self.agents.ledgers.values() for turn in ledger]
        self.updates.append({
            "versions": sorted({str(span.version) for turn in turns for span in turn.draft.engine.versions}),
            "trained_tokens": sum(map(sum, columns["env_mask"])),
            "apart": apart(trainer, columns, row=0),
            "rollout_s": time.monotonic() - began,
        })  # fmt: skip
        return columns


def apart(trainer: Any, columns: dict[str, Any], row: int) -> float:
    """Return the largest difference of a rollout's recorded logprobs and those of the trainer's weights, in nats."""
    prompt, completion = columns["prompt_ids"][row], columns["completion_ids"][row]
    ids = torch.tensor([prompt + completion], device=trainer.accelerator.device)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    own = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
    recorded, mask = torch.tensor(columns["logprobs"][row]), torch.tensor(columns["env_mask"][row]).bool()
    return float((own - recorded)[mask].abs().max()) if mask.any() else 0.0


def load_merged(trainer: Any, policy: Policy, folder: Path) -> None:
    """Merge a copy of the adapter into the model, write it, and load it into the running engine as "step-N"."""
    step = trainer.state.global_step
    path = folder / f"merged-{step % 2}"  # the engine may still read the other
    copy.deepcopy(trainer.model).merge_and_unload().save_pretrained(path)

    async def load() -> None:
        try:
            await policy.backend.load_weights(str(path), f"step-{step}")  # type: ignore[attr-defined]  # an EngineAdmin
        finally:
            await policy.aclose()

    run_blocking(load())


def trainer_of(
    settings: Settings, folder: str, out: Path, rollouts: Any, agents: Agents, train: Sequence[str], **more: Any
) -> Any:
    """Return TRL's trainer with an adapter on every linear layer of the model in `folder`."""
    config = GRPOConfig(
        output_dir=str(out / "checkpoints"),
        max_steps=settings.updates,
        per_device_train_batch_size=settings.micro,
        gradient_accumulation_steps=settings.batch // settings.micro,
        num_generations=settings.copies,
        max_completion_length=settings.tokens,
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **more,
    )
    return GRPOTrainer(
        model=folder,
        reward_funcs=[recorded_reward, agents.tool_use_reward],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt_of(question)} for question in train]),
        processing_class=rollouts.policy.tokenizer,
        rollout_func=rollouts,
        peft_config=LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear"),
    )


def moved(trainer: Any, before: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return how many parameters the adapter has, in how many tensors, and how many tensors the training changed.

    Raises:
        RuntimeError: The adapter did not change, or something else did.
    """
    changed = {
        name for name, value in trainer.model.named_parameters() if not torch.equal(value.detach().cpu(), before[name])
    }
    adapter = {name: value for name, value in trainer.model.named_parameters() if "lora_" in name}
    if not changed or changed - set(adapter):
        raise RuntimeError(f"{len(changed)} tensors changed, {len(changed - set(adapter))} of them not the adapter's.")
    return {"parameters": sum(map(torch.numel, adapter.values())), "tensors": len(adapter), "changed": len(changed)}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the rewards of the updates, and as circles the held-out scores before and after, as SVG."""
    last = max(1, len(report["updates"]) - 1)
    shapes = []
    for y in (20, 120, 220):
        shapes.append(f'<path d="M40 {y}H600" stroke="#888" stroke-opacity=".3"/>')
        shapes.append(f'<text x="8" y="{y + 4}" fill="#888">{(220 - y) / 200:.1f}</text>')
    for row, (name, label, colour) in enumerate((("right", "answer", "#2a78d6"), ("tool_use", "tool use", "#eb6834"))):
        heights = [220 - 200 * update[name] for update in report["updates"]]
        points = " ".join(f"{60 + 520 * at / last:.1f},{y:.1f}" for at, y in enumerate(heights))
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes.append(f'<text x="50" y="{30 + 14 * row}" fill="{colour}">{label}; circles: held-out</text>')
        ends = ((40, report["before"][name]), (600, report["after"][name]))
        shapes += [f'<circle cx="{x}" cy="{220 - 200 * value:.1f}" r="5" fill="{colour}"/>' for x, value in ends]
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 240" font-family="sans-serif" font-size="11">'
    path.write_text("\n".join([head, *shapes, "</svg>", ""]), "utf-8")


@contextlib.contextmanager
def server(model: str, gpu: str, port: int, share: float) -> Iterator[str]:
    """Run the vLLM that TRL's server mode needs, by TRL's own command, on a share of a GPU; give its address.

    Raises:
        RuntimeError: It ended.
    """
    url = f"http://127.0.0.1:{port}"
    wanted = {"port": port, "max_model_len": 8192, "gpu_memory_utilization": share}
    command = build_command(ScriptArguments(model=model, host="127.0.0.1", **wanted))
    given = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": gpu}
    process = subprocess.Popen(command, env=given)
    try:
        while not answers(url):
            if process.poll() is not None:
                raise RuntimeError(f"vLLM ended with status {process.returncode} before it answered.")
            time.sleep(2)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    """Return whether the server at this address is up."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
        return True
    return False


@contextlib.contextmanager
def tiny_server(model: str, torch_index: str | None) -> Iterator[tuple[str, str]]:
    """Run vLLM on this CPU, installed if necessary; give its address and the folder of the model."""
    import tito_engines as engines
    from tito_engines import install, models

    with engines.running_sync("vllm", model=model, dev_mode=True, torch_index=torch_index) as url:
        yield url, str(models.ensure(model, install.ensure(engines.find("vllm")).python))


def run(
    settings: Settings, url: str, folder: str, out: Path, *, place: str, make: type[Agents] = Agents
) -> dict[str, Any]:
    """Run the pipeline on a server; return the report. `place` is "cpu", "gpu" or "gpus"."""
    began = time.monotonic()
    policy = Policy.connect(backend="vllm", base_url=url, tokenizer=folder, patience_s=900)
    answers = problems(settings.held_out + settings.train, settings.operations)
    held_out, train = [*answers][: settings.held_out], [*answers][settings.held_out :]
    agents = make(answers, settings.operations)
    report: dict[str, Any] = {"settings": asdict(settings), "engine": f"vllm {policy.info.version}"}
    report["before"] = run_blocking(evaluate(policy, agents, held_out, settings.tokens))
    print("before", report["before"], flush=True)
    with tempfile.TemporaryDirectory() as weights:
        rollouts = Rollouts(policy, agents, frozenset(held_out), Path(weights), place != "gpus")
        own: dict[str, Any] = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
        if place != "cpu":
            own = {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}}
        if place == "gpus":
            own |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
        trainer = trainer_of(settings, folder, out, rollouts, agents, train, **own)
        start = {name: value.detach().cpu().clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
        report["adapter"] = moved(trainer, start)
        trainer.save_model(str(out / "adapter"))
        load_merged(trainer, policy, Path(weights))
        report["after"] = run_blocking(evaluate(policy, agents, held_out, settings.tokens))
    print("after", report["after"], flush=True)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    for update, log in zip(rollouts.updates, logs, strict=True):
        update["right"] = log["rewards/recorded_reward/mean"]
        update["tool_use"] = log["rewards/tool_use_reward/mean"]
        update |= {name: value for name, value in log.items() if name in ("loss", "grad_norm") or "sampling" in name}
    return {**report, "updates": rollouts.updates, "seconds": time.monotonic() - began}


def main() -> None:
    """Read the command line, run, and write the report and the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, without TRL's server mode")
    parser.add_argument("--harness", action="store_true", help="a harness of another SDK, through the gateway")
    parser.add_argument("--out", type=Path, default=Path("runs/trl_lora"))
    parser.add_argument("--gpus", default="0,1", help="the trainer's and the server's; or one for both")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--torch-index", default=None, help="package index with CPU builds of torch, if pip needs one")
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=None)
    arguments = parser.parse_args()
    chosen = {name: value for name, value in vars(arguments).items() if name in asdict(TINY) and value is not None}
    settings = replace(TINY if arguments.tiny else Settings(), **chosen)
    arguments.out.mkdir(parents=True, exist_ok=True)
    make = HarnessAgents if arguments.harness else Agents
    logging.getLogger("strands.tools").setLevel(logging.CRITICAL)  # the policy makes malformed calls at first
    if arguments.tiny:
        with tiny_server(settings.model, arguments.torch_index) as (url, folder):
            report = run(settings, url, folder, arguments.out, place="cpu", make=make)
    else:
        trainers, *servers = arguments.gpus.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = trainers  # before CUDA starts: the trainer takes all that it sees
        place, share = ("gpus", 0.9) if servers else ("gpu", 0.4)
        with server(settings.model, servers[0] if servers else trainers, arguments.port, share) as url:
            report = run(settings, url, settings.model, arguments.out, place=place, make=make)
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    draw(report, arguments.out / "curves.svg")
    figures = " -> ".join(f"{report[when]['right']:.2f}" for when in ("before", "after"))
    apart_by = max(update["apart"] for update in report["updates"])
    print(
        f"trl_lora: ok, {len(report['updates'])} updates of {report['adapter']['parameters']:,} parameters, "
        f"{report['seconds']:.0f} s, held-out {figures}, logprobs at most {apart_by:.1e} nats apart"
    )


if __name__ == "__main__":
    main()
