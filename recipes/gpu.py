"""Measure on one GPU what a small model on a CPU cannot show, and write a page of it.

recipes/gpu.sh            # on a machine with one GPU: installs what this needs, and runs it
recipes/gpu.sh --tiny     # all of it on a CPU: SmolLM2-135M on a real vLLM, and on a real SGLang for the kept sets

The page has the demo's questions with the ids as sampled and from re-tokenized text, the mismatch under top-p with and
without the kept sets, what a change of weights loses, and the learning curve of recipes/trl_lora. The server's scores
stand in for a trainer's logprobs; the learning curve has TRL's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from strands.types.exceptions import MaxTokensReachedException

from calculator import QUESTIONS, make_agent
from partial_rollouts import TOPICS, run_rollout, update_weights
from strands_tito import Ledger, Policy
from strands_tito.export.kept import KeptSets, kept_logprobs, kept_sets_of
from strands_tito.inspect.mismatch import Mismatch, mismatch_of
from strands_tito.inspect.show import drifted_turns
from tito_core.backend.generate import score
from tito_core.backend.sampling import SamplingOptions
from training import batch

HERE = Path(__file__).resolve().parent
TOP_K = 19
"""The most that vLLM records at its own limits."""
STORY = 400
"""Tokens of each answer of `partial_rollouts.run_rollout`."""
IDS = 64
"""Ids whose scores one request asks for."""
MASKS = ("--return-sampling-mask", "--logprobs-mode", "processed_logprobs", "--max-logprobs", str(IDS))
Figures = dict[str, Any]


@contextlib.contextmanager
def on_gpu(model: str, port: int, *flags: str) -> Iterator[tuple[str, str]]:
    """Run vLLM on the GPU; give its address, and the folder of the model.

    Raises:
        RuntimeError: It ended.
    """
    from huggingface_hub import snapshot_download

    folder, url = snapshot_download(model), f"http://127.0.0.1:{port}"
    program = str(Path(sys.executable).with_name("vllm"))
    command = [program, "serve", folder, "--served-model-name", model, "--port", str(port), "--max-model-len", "8192"]
    given = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    process = subprocess.Popen([*command, "--enable-scale-out", *flags], env=given)
    try:
        while fetched(f"{url}/health") is None:  # vLLM's answer is empty
            if process.poll() is not None:
                raise RuntimeError(f"vLLM ended with status {process.returncode} before it answered.")
            time.sleep(0.5)
        yield url, folder
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def on_cpu(backend: str, torch_index: str | None) -> Iterator[tuple[str, str]]:
    """Run an engine with SmolLM2 on this CPU, installed if necessary; give its address and the model's folder."""
    import tito_engines as engines
    from tito_engines import install, models

    with engines.running_sync(backend, model="smollm2", dev_mode=True, torch_index=torch_index) as url:
        yield url, str(models.ensure("smollm2", install.ensure(engines.find(backend)).python))


def fetched(url: str) -> str | None:
    """Return what an address answers, None where nothing does."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())
    return None


async def ask(policy: Policy, copies: int, sampling: SamplingOptions, **options: Any) -> list[Ledger]:
    """Roll out each of the demo's questions several times, and record whether the last words have the answer."""
    slots = asyncio.Semaphore(32)

    async def one(question: str) -> Ledger:
        async with slots:
            model = policy.model(sampling=sampling, **options)
            with contextlib.suppress(MaxTokensReachedException):  # truncated answers count too
                await make_agent(model).invoke_async(question, limits={"turns": 6})
            return model.ledger

    return list(await asyncio.gather(*(one(question) for question in QUESTIONS for _ in range(copies))))


async def questions(policy: Policy, copies: int, tokens: int) -> Figures:
    """Compare the recorded ids with those of re-tokenized text."""
    ledgers = await ask(policy, copies, {"temperature": 1.0, "max_new_tokens": tokens})
    paths = [path for ledger in ledgers for path in ledger.trajectories]
    again = batch.retokenized(ledgers, policy.tokenizer)
    exact = [(path.token_ids, path.loss_mask == 1, path.logprobs) for path in paths]
    text = [(row.ids, row.mask, row.logprobs) for row in again]
    ours, apart = await compared(policy, exact)
    drifted, _ = await compared(policy, text)
    return {
        "rollouts, turns, sampled tokens": f"{len(ledgers)}, {sum(map(len, ledgers))}, {ours.tokens:,}",
        "turns whose text encodes to other ids": sum(len(drifted_turns(each, policy.tokenizer)) for each in ledgers),
        "rollouts in one row": sum(len(ledger.trajectories) == 1 for ledger in ledgers),
        "|recorded - re-scored| of the sampled ids, p50, p99, max": ", ".join(f"{each:.1e}" for each in apart),
        "mismatch, ids as sampled": shown(ours),
        "mismatch, ids of re-tokenized text": shown(drifted),
    }


async def compared(policy: Policy, rows: Sequence[tuple[Any, Any, Any]]) -> tuple[Mismatch, np.ndarray]:
    """Return the mismatch of (ids, mask, logprobs) and the server's scores, and quantiles of the differences."""
    scores = await asyncio.gather(*(score(policy.backend, ids.tolist()) for ids, _, _ in rows))
    recorded = np.concatenate([logprobs[mask] for _, mask, logprobs in rows])
    own = np.concatenate([each[mask] for each, (_, mask, _) in zip(scores, rows, strict=True)])
    return whole(recorded, own), np.quantile(np.abs(own - recorded), (0.5, 0.99, 1.0))


async def kept(policy: Policy, copies: int, tokens: int) -> Figures:
    """Compare what was sampled under top-p with scores over the whole vocabulary, and over the kept sets."""
    sampling: SamplingOptions = {"temperature": 1.0, "top_p": 0.9, "top_k": TOP_K, "max_new_tokens": tokens}
    outputs = {"sampling_mask": True, "top_logprobs": TOP_K}
    ledgers = await ask(policy, copies, sampling, optional_outputs=outputs)
    sampled, plain, replayed = [], [], []
    for path in (path for ledger in ledgers for path in ledger.trajectories):
        sets, mask = kept_sets_of(path), path.loss_mask == 1
        assert sets is not None  # the sampling truncates
        ids = np.unique(np.concatenate([sets.ids, path.token_ids[mask]]))
        scores = (await scored(policy, path.token_ids.tolist(), ids.tolist()))[mask]
        own = np.searchsorted(ids, path.token_ids[mask])
        counts = sets.counts[mask]
        chosen = np.repeat(mask, sets.counts)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        part = KeptSets(np.searchsorted(ids, sets.ids[chosen]).astype(np.int32), offsets, sets.mass[mask])
        sampled.append(path.logprobs[mask] - np.log(part.mass.mean(axis=1)))
        plain.append(scores[np.arange(len(own)), own])
        replayed.append(kept_logprobs(scores, own, part))
    recorded = np.concatenate(sampled)
    return {
        "rollouts, sampled tokens": f"{len(ledgers)}, {len(recorded):,}",
        "mismatch, over the whole vocabulary": shown(whole(recorded, np.concatenate(plain))),
        "mismatch, over the recorded kept sets": shown(whole(recorded, np.concatenate(replayed))),
    }


async def scored(policy: Policy, token_ids: list[int], of: list[int]) -> Any:
    """Return the logprobs of given ids in the place of each token, (n, k)."""
    parts = [of[start : start + IDS] for start in range(0, len(of), IDS)]
    found = await asyncio.gather(*(score(policy.backend, token_ids, of=part) for part in parts))
    return np.concatenate([each[:, 1:] for each in found], axis=1)


async def update(policy: Policy, url: str, folder: str, seconds: float) -> Figures:
    """Change the weights under running answers, and compare the engine's count of sampled tokens with the recorded."""
    before = counted(url)
    rollouts = [asyncio.ensure_future(run_rollout(policy, topic)) for topic in TOPICS]
    await asyncio.sleep(seconds)
    await update_weights(policy, folder, "step-1")
    ledgers = await asyncio.gather(*rollouts)
    recorded = sum(len(turn.draft.output_ids) for ledger in ledgers for turn in ledger)
    versions = [{span.version for turn in ledger for span in turn.draft.versions} for ledger in ledgers]
    sampled = counted(url) - before
    return {
        "answers, tokens asked for": f"{len(TOPICS)}, {len(TOPICS) * STORY:,}",
        "answers whose tokens have two versions": sum(len(each) == 2 for each in versions),
        "tokens that the engine counted, recorded": f"{sampled:,}, {recorded:,}",
        "lost": sampled - recorded,
    }


def counted(url: str) -> int:
    """Return how many tokens vLLM has sampled since its start, by its own metrics."""
    found = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", fetched(f"{url}/metrics") or "", re.MULTILINE)
    return sum(int(float(each)) for each in found)


def whole(recorded: Any, own: Any) -> Mismatch:
    """Return the mismatch of all tokens."""
    none = np.zeros(len(recorded), int)
    found = mismatch_of(recorded, own, turns=none, positions=none).whole
    assert found is not None  # something was sampled
    return found


def shown(found: Mismatch) -> str:
    """Return a mismatch as a cell of the page."""
    return (
        f"KL {found.kl:.1e}, reverse {found.reverse_kl:.1e} nats a token, effective sample size {found.effective:.1%}, "
        f"{found.far:.1%} of ratios outside 0.5 to 2"
    )


def curve(arguments: argparse.Namespace, out: Path) -> Figures:
    """Run recipes/trl_lora in a process of its own, and keep its curves."""
    options = ["--tiny"] if arguments.tiny else ["--gpus", "0", "--updates", str(arguments.updates)]
    options += ["--port", str(arguments.port)]
    options += ["--torch-index", arguments.torch_index] if arguments.torch_index else []
    command = [
        arguments.trl_python,
        str(HERE / "trl_lora" / "run_pipeline.py"),
        *options,
        "--out",
        str(out / "trl_lora"),
    ]
    path = os.pathsep.join([str(Path(arguments.trl_python).absolute().parent), os.environ["PATH"]])  # has TRL's vLLM
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})
    report = json.loads((out / "trl_lora" / "report.json").read_text())
    shutil.copy(out / "trl_lora" / "curves.svg", out)
    updates, model = report["updates"], report["settings"]["model"]
    return {
        "model, updates, minutes": f"{model}, {len(updates)}, {report['seconds'] / 60:.0f}",
        "held-out problems right, before": f"{report['before']['right']:.2f}",
        "after": f"{report['after']['right']:.2f}",
        "|recorded - TRL's own logprob|, furthest of any update": f"{max(each['apart'] for each in updates):.1e}",
    }


def page(arguments: argparse.Namespace, parts: Mapping[str, Figures]) -> str:
    """Return the page."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout
    gpu = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device = "a CPU" if arguments.tiny else subprocess.run(gpu, capture_output=True, text=True).stdout.strip()
    model = "SmolLM2-135M" if arguments.tiny else arguments.model
    lines = ["# On one GPU", "", f"{model} on {device}, commit {commit.strip()}, {datetime.now(UTC).date()}.", ""]
    for title, figures in parts.items():
        lines += [f"## {title}", "", "| | |", "| --- | --- |"]
        lines += [f"| {name.replace('|', chr(92) + '|')} | {value} |" for name, value in figures.items()] + [""]
    if (arguments.out / "curves.svg").exists():
        lines += ["![Rewards by update, held-out scores before and after](curves.svg)", ""]
    return "\n".join(lines)


def main() -> None:
    """Measure each part, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    parser.add_argument("--model", default="Qwen/Qwen3-4B-Instruct-2507")
    parser.add_argument("--copies", type=int, default=8, help="rollouts of each question")
    parser.add_argument("--updates", type=int, default=60, help="of the learning curve")
    parser.add_argument("--trl-python", default=sys.executable, help="Python of the environment of recipes/trl_lora")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--torch-index", default=None, help="package index with CPU builds of torch, if pip needs one")
    arguments = parser.parse_args()
    tokens, copies = (64, 1) if arguments.tiny else (1024, arguments.copies)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "curves.svg").unlink(missing_ok=True)  # of an earlier run
    parts: dict[str, Figures] = {}

    def keep(title: str, figures: Figures) -> None:
        parts[title] = figures
        (arguments.out / "page.md").write_text(page(arguments, parts), "utf-8")  # a later part may fail after hours

    plain = on_cpu("vllm", arguments.torch_index) if arguments.tiny else on_gpu(arguments.model, arguments.port)
    with plain as (url, folder):
        policy = Policy.connect(backend="vllm", base_url=url, tokenizer=folder, patience_s=900)
        keep("The demo's questions", asyncio.run(questions(policy, copies, tokens)))
        keep("A change of weights", asyncio.run(update(policy, url, folder, 3.0 if arguments.tiny else 1.5)))
    masks = (
        on_cpu("sglang", arguments.torch_index) if arguments.tiny else on_gpu(arguments.model, arguments.port, *MASKS)
    )
    with masks as (url, folder):
        backend = "sglang" if arguments.tiny else "vllm"
        policy = Policy.connect(backend=backend, base_url=url, tokenizer=folder, patience_s=900)
        keep(f"top-p 0.9, top-k {TOP_K}", asyncio.run(kept(policy, copies, tokens)))
    keep("A learning curve", curve(arguments, arguments.out))
    print(f"gpu: ok, {arguments.out / 'page.md'}")


if __name__ == "__main__":
    main()
