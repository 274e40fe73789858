"""Output of a training run: a line for each update, the logprob comparison, the table and the plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from train_tiny import Run

CAPTION = """Dots are batches of rollouts, the line through them the mean of three. The ratio's line is its mean before
the first step on a batch, where the rollouts are exactly on-policy; the band is its range before the last step. The
mismatch is KL(engine, learner), k3, before the first step: on the recorded ids, and dashed on re-tokenized text."""
BEGIN, END = "<!-- figures: written by make train-tiny -->", "<!-- end of figures -->"


def line(figures: Mapping[str, Any]) -> str:
    """Return the figures of an update in one line."""
    low, _, high = figures["passes"][-1]["ratio"]
    ours, theirs = (figures["mismatch"][name]["kl"] for name in ("ours", "retokenized"))
    taught = f"reverse kl {figures['reverse_kl']:.3f}  " if "reverse_kl" in figures else ""
    return (
        f"update {figures['update']:2}  reward {figures['reward']:.3f}  {taught}kl {figures['kl']:.4f}  "
        f"ratio {low:.2f}..{high:.2f}  mismatch {ours:.0e}, re-tokenized {theirs:.0e}  "
        f"{figures['version']}  {figures['seconds']:.0f} s"
    )


def proof_lines(proof: Mapping[str, Any]) -> list[str]:
    """Return the comparison of logprobs as lines: measure, on the sampled ids, on re-tokenized text."""
    ours, theirs = proof["ours"], proof["retokenized"]
    rows = [("", "our ids", "re-tokenized text"), ("sampled tokens compared", ours["tokens"], theirs["tokens"])]
    rows += [(f"|recorded - recomputed|, {q}", f"{ours[q]:.1e}", f"{theirs[q]:.1e}") for q in ("p99", "max")]
    rows += [
        (f"importance ratio, {q}", f"{ours['ratio'][at]:.3f}", f"{theirs['ratio'][at]:.3f}")
        for at, q in enumerate(("lowest", "mean", "highest"))
    ]
    samples = proof["samples"]
    rows += [("samples whose ids changed", f"0 of {samples}", f"{proof['retokenizing_changes']} of {samples}")]
    return [f"{what:32}{mine!s:>12}{other!s:>20}" for what, mine, other in rows]


def show(console: Console, run: Run) -> None:
    """Print the results."""
    changed, samples = (sum(u[name] for u in run.updates) for name in ("retokenizing_changes", "samples"))
    first, last = ends(run.updates)
    if run.reverse_kl:
        console.print(f"reverse KL  {_between(run.reverse_kl)} nats a token on held-out questions", highlight=False)
    console.print(
        f"reward      {first:.3f} in the first updates, {last:.3f} in the last; "
        f"held-out questions {run.before:.3f} before, {run.after:.3f} after\n"
        f"drift       re-tokenizing would have changed {changed} of {samples} samples ({changed / samples:.0%})\n"
        f"apart       at most {max(u['apart'][0] for u in run.updates):.1e} nats between engine and learner, "
        f"in all {len(run.updates)} updates\n"
        f"time        {run.seconds / 60:.1f} minutes",
        highlight=False,
    )


def ends(updates: list[dict[str, Any]], name: str = "reward") -> tuple[float, float]:
    """Return the mean of a figure over the first three and over the last three updates."""
    found = [update[name] for update in updates]
    return sum(found[:3]) / len(found[:3]), sum(found[-3:]) / len(found[-3:])


def _between(pair: Sequence[float]) -> str:
    return f"{pair[0]:.3f} before, {pair[-1]:.3f} after"


def keep(run: Run, page: Path) -> None:
    """Write a page's table, and next to the page the figures of the latest run of each kind and their plot."""
    page.parent.mkdir(parents=True, exist_ok=True)
    figures = page.with_suffix(".json")
    runs = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    runs[run.name] = asdict(run)
    figures.write_text(_short(runs), encoding="utf-8")
    plot(runs, page.with_suffix(".svg"))
    before, after = "# A run\n\n", "\n"
    if page.exists():
        before, rest = page.read_text(encoding="utf-8").split(BEGIN)
        after = rest.split(END)[1]
    shown = f"![Reward, KL, importance ratio, mismatch]({page.with_suffix('.svg').name})\n\n{CAPTION}\n\n{table(runs)}"
    page.write_text(f"{before}{BEGIN}\n\n{shown}\n\n{END}{after}", encoding="utf-8")


def _short(runs: Mapping[str, Any]) -> str:
    """Return runs as JSON, each on a line of its own, with digits enough for float32."""
    rounded = json.loads(json.dumps(runs, sort_keys=True), parse_float=lambda text: float(f"{float(text):.8g}"))
    lines = (f"{json.dumps(name)}:{json.dumps(run, separators=(',', ':'))}" for name, run in rounded.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table(runs: Mapping[str, Any]) -> str:
    """Return the page's table in Markdown, with one column for each kind of run."""
    names = [name for name in COLOURS if name in runs]
    found = [_summary(runs[name]) for name in names]
    head = ["", *(runs[name]["engine"] for name in names)]
    rows = [head, ["---"] * len(head)]
    rows += [[what, *(each.get(what, "") for each in found)] for what in max(found, key=len)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _summary(run: Mapping[str, Any]) -> dict[str, str]:
    updates, proof = run["updates"], run["proof"]
    (first, last), settings = ends(updates), run["settings"]
    changed, samples = (sum(update[name] for update in updates) for name in ("retokenizing_changes", "samples"))
    ratio = max(abs(edge - 1) for update in updates for edge in update["passes"][0]["ratio"])
    ours, theirs = proof["ours"], proof["retokenized"]
    taught = {}
    if run.get("reverse_kl"):
        started, ended = (f"{value:.3f}" for value in ends(updates, "reverse_kl"))
        taught = {
            "reverse KL to the teacher, first and last three updates": f"{started}, **{ended}**",
            f"the same on {settings['held_out']} held-out questions": _between(run["reverse_kl"]),
        }
    return {
        "updates, rollouts, sampled tokens": f"{len(updates)}, {samples}, {sum(u['sampled'] for u in updates)}",
        "minutes": f"{run['seconds'] / 60:.1f}",
        "mean reward, first three updates": f"{first:.3f}",
        "mean reward, last three updates": f"**{last:.3f}**",
        f"{settings['held_out']} held-out questions, before": f"{run['before']:.3f}",
        f"{settings['held_out']} held-out questions, after": f"**{run['after']:.3f}**",
        **taught,
        "weight version that sampled last": f"`{updates[-1]['sampled_by'][0]}`",
        "KL from the start, at the last update": f"{updates[-1]['kl']:.3f}",
        "\\|recorded - recomputed\\|, our ids, first update, max": f"{ours['max']:.1e}",
        "the same over all updates, max": f"{max(update['apart'][0] for update in updates):.1e}",
        "importance ratio, our ids, furthest from 1": f"{ratio:.1e}",
        **(_mismatches(updates) if "mismatch" in updates[0] else {}),
        "\\|recorded - recomputed\\|, re-tokenized text, max": f"{theirs['max']:.1f}",
        "importance ratio, re-tokenized text": f"{theirs['ratio'][0]:.1e} to {theirs['ratio'][2]:.1e}",
        "samples that re-tokenizing would have changed": f"{changed} of {samples} ({changed / samples:.0%})",
    }


def _mismatches(updates: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    rows = {}
    for name, what in (("ours", "our ids"), ("retokenized", "re-tokenized text")):
        found = [update["mismatch"][name] for update in updates]
        kl, reverse = (max(each[figure] for each in found) for figure in ("kl", "reverse_kl"))
        rows[f"KL(engine, learner) and KL(learner, engine), {what}, worst update"] = f"{kl:.1e}, {reverse:.1e}"
        size, far = min(each["effective"] for each in found), max(each["far"] for each in found)
        rows[f"effective sample size, ratios outside 0.5 to 2, {what}, worst update"] = f"{size:.1%}, {far:.1%}"
    return rows


COLOURS = {
    "vllm": "#2a78d6",
    "sglang": "#eb6834",
    "vllm, LoRA": "#3f9c5a",
    "vllm, taught": "#8a5bd0",
    "sglang, taught": "#b08a1e",
}

LOOKS: dict[Any, Any] = {"svg.hashsalt": "tito", "svg.fonttype": "none", "font.size": 9}
"""Equal figures make equal files, and text is not converted to paths."""
DARK = """<style>@media (prefers-color-scheme: dark) { text { fill: #e6e9ea } path[style="fill: #ffffff"] {
fill: #1b2024 !important } [style*="stroke: #000000"] { stroke: #a3adb3 !important } }</style>"""


def plot(runs: Mapping[str, Any], path: Path) -> None:
    """Draw the figures over updates as SVG, one colour for each kind of run."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams.update({**LOOKS, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 6), layout="constrained")
    *panels, last = axes.flat
    for name in (name for name in COLOURS if name in runs):
        _draw(runs[name], COLOURS[name], *panels)
    titles = ("reward", "KL from the start, nats a token", "importance ratio", "mismatch, nats a token")
    for each, title in zip(panels, (*titles, "reverse KL to the teacher, nats a token"), strict=True):
        each.set(title=title, xlabel="update")
        each.grid(alpha=0.25)
    panels[0].set_ylim(0, 1)
    panels[1].set_ylim(0, None)
    panels[3].set_yscale("log")
    panels[4].set_ylim(0, None)
    last.axis("off")
    last.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="center")
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    drawn = path.read_text(encoding="utf-8")
    path.write_text(drawn.replace(" <defs>", f" {DARK}\n <defs>", 1), encoding="utf-8")


def _draw(run: Mapping[str, Any], colour: str, reward: Any, kl: Any, ratio: Any, mismatch: Any, taught: Any) -> None:
    updates = run["updates"]
    steps, rewards = [update["update"] for update in updates], [update["reward"] for update in updates]
    recent = [rewards[max(0, at - 2) : at + 1] for at in range(len(rewards))]
    reward.plot(steps, rewards, "o", color=colour, markersize=3, alpha=0.5)
    reward.plot(steps, [sum(window) / len(window) for window in recent], color=colour, label=run["engine"])
    kl.plot(steps, [update["kl"] for update in updates], color=colour)
    first, last = ([update["passes"][at]["ratio"] for update in updates] for at in (0, -1))
    ratio.fill_between(steps, [low for low, _, _ in last], [high for *_, high in last], color=colour, alpha=0.2, lw=0)
    ratio.plot(steps, [mean for _, mean, _ in first], color=colour, lw=1.5)
    for name, style in (("ours", "-"), ("retokenized", "--")) if "mismatch" in updates[0] else ():
        mismatch.plot(steps, [update["mismatch"][name]["kl"] for update in updates], style, color=colour)
    if run.get("reverse_kl"):
        taught.plot(steps, [update["reverse_kl"] for update in updates], color=colour)
