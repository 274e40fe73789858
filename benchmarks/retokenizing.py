"""Client CPU by number of turns, as it is and where the whole conversation is rendered and encoded before each turn.

    python benchmarks/retokenizing.py [--json] [--quick | --smallest]

TRL measured that it takes 4% of the generation time at 8 turns, 56% at 128 (huggingface/trl #6250). Here both rollouts
are ours, from a prompt of 500 tokens, 300 sampled tokens and a tool call in each turn, on SGLang's wire; the server
answers at once, so only the client's CPU is seen. `ours_ms` and `retokenizing_ms` are the mean of a turn, by the number
of turns of the rollout; `turns_ms` has the median of each turn, which the figure shows.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from bench import HERE, Client, canned_server, options, report
from rich.table import Table

TURNS = ((8, 32, 128), (8, 32, 128), (2, 8))
ROUNDS = (7, 3, 1)
NAMES = {"ours": "#2a78d6", "retokenizing": "#eb6834"}
FIGURE = HERE.parent / "docs/images/retokenizing.svg"


def measure(rounds: int, turns: int) -> dict[str, list[float]]:
    """Return the median milliseconds of each turn, by name."""
    samples: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    with canned_server() as port:
        client = Client(sys.executable, "turns_of_a_rollout.py", str(port))
        for name in NAMES:
            client.ask(name=name, turns=8)  # warm-up
        for _ in range(rounds):
            for name, of in samples.items():
                of.append(client.ask(name=name, turns=turns))
        client.close()
    return {name: [statistics.median(each) for each in zip(*of, strict=True)] for name, of in samples.items()}


def draw(found: dict[str, list[float]], path: Path) -> None:
    """Draw the milliseconds of each turn as SVG."""
    top, last = max(map(max, found.values())), len(found["ours"]) - 1
    shapes = []
    for part in range(3):
        y = 220 - 100 * part
        shapes.append(f'<path d="M44 {y}H600" stroke="#888" stroke-opacity=".3"/>')
        shapes.append(f'<text x="6" y="{y + 4}" fill="#888">{top * part / 2:.0f} ms</text>')
    for row, (name, values) in enumerate(found.items()):
        points = " ".join(
            f"{44 + 556 * at / last:.1f},{220 - 200 * value / top:.1f}" for at, value in enumerate(values)
        )
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{NAMES[name]}" stroke-width="2"/>')
        shapes.append(
            f'<text x="56" y="{34 + 14 * row}" fill="{NAMES[name]}">{name}: CPU of each turn, 1 to {last + 1}</text>'
        )
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 240" font-family="sans-serif" font-size="11">'
    path.write_text("\n".join([head, *shapes, "</svg>", ""]), "utf-8")


def main() -> None:
    """Measure, print, and draw with --write."""
    arguments = options(__doc__).parse_args()
    numbers = TURNS[arguments.size]
    found = measure(ROUNDS[arguments.size], max(numbers))
    means = {name: {n: statistics.mean(of[:n]) for n in numbers} for name, of in found.items()}
    results: dict[str, Any] = {**{f"{name}_ms": of for name, of in means.items()}, "turns_ms": found}
    table = Table("", *(f"{n} turns" for n in numbers), title="CPU milliseconds of one turn, mean over a rollout")
    for name, of in means.items():
        table.add_row(name, *(f"{of[n]:.2f}" for n in numbers))
    shares = (1 - means["ours"][n] / means["retokenizing"][n] for n in numbers)
    table.add_row("share of rendering and encoding", *(f"{share:.0%}" for share in shares))
    report(arguments, results, table)
    if arguments.write:
        draw(found, FIGURE)


if __name__ == "__main__":
    main()
