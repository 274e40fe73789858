"""Chat templates: certification, exactness over random conversations, safety under attack, and speed.

    python benchmarks/templates.py [--json] [--quick | --smallest]
    python benchmarks/templates.py --page      (writes the table of docs/templates.md)

Run it from the repository: it uses the templates and tokenizers of the tests (tests/support/zoo.py), fetched once. Each
delta is compared with transformers' own rendering of the whole conversation, with 30% of the turns truncated.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from bench import SMALLEST, options, report
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import peers, structures, zoo
from support.attacks import Attempt, attack, controls, from_content
from support.conversations import calls, results, user
from support.extending import broken_prefixes
from support.rollouts import Features, check, encode, rollout
from tito_core.chat.rendering import TemplateError
from tito_core.chat.template import ChatTemplate

PAGE, BEGIN = Path(__file__).resolve().parents[1] / "docs" / "templates.md", "<!-- zoo -->"
CONTEXTS = {"delta_ms_2k": 2_000, "delta_ms_128k": 128_000}
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "sees",
    "a",
    "door",
    "in",
    "long",
    "grey",
    "wall",
    "and",
    "opens",
    "it",
    "quietly",
)
REAL = {"qwen3": "qwen3", "llama3": "llama3_1", "gptoss": "gptoss", "gemma3": "gemma3", "deepseek": "deepseekv3"}
"""Each real tokenizer and one of its own templates."""
LETTERS = "abcdefghij XYZ 0123456789 .,;:!?'\"()-_/\\\n\t é日本語Ωß😀\u00a0{}="


@dataclass(frozen=True)
class Certified:
    """The certified templates with their tokenizers, why the others are not, and the CPU seconds that each took.

    The first template of a tokenizer pays for the copy of that tokenizer.
    """

    templates: dict[str, tuple[ChatTemplate, Any]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def times(self) -> dict[str, Any]:
        """Return the CPU time of certification."""
        slowest = max(self.seconds, key=lambda name: self.seconds[name])
        return {
            "certify_s_median": statistics.median(self.seconds.values()),
            "certify_s_slowest": self.seconds[slowest],
            "certify_slowest": slowest,
            "certify_s": self.seconds,
        }


def certify(names: Sequence[str]) -> Certified:
    """Certify templates, without the cache."""
    found = Certified()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            tokenizer = (structures if name in structures.STRUCTURES else zoo).tokenizer(name)
            started = time.process_time()
            try:
                template = ChatTemplate.of(tokenizer, certificates=Path(folder))
            except TemplateError as error:
                found.refused[name] = str(error)
                continue
            found.seconds[name] = time.process_time() - started
            if template.certificate.tools:
                found.templates[name] = (template, tokenizer)
            else:
                found.refused[name] = "It shows no calls."
    return found


def converse(certified: dict[str, tuple[ChatTemplate, Any]], conversations: int) -> dict[str, Any]:
    """Count exact deltas over random conversations, distributed evenly over the templates."""
    counts: Counter[str] = Counter()
    each = -(-conversations // len(certified))
    for name, (template, tokenizer) in certified.items():
        shown = Features.of(template)
        for seed in range(each):
            drawn = rollout(Random(f"{name} {seed}"), shown)
            counts["broken"] += broken_prefixes(template, tokenizer, drawn)
            for turn, found, expected, truth in check(template, tokenizer, drawn):
                counts["turns"] += 1
                counts["truncated"] += turn.opened is not None
                counts["exact"] += found == expected
                counts["rerendered"] += peers.rerendered_extends(template, tokenizer, drawn, turn, truth)
                counts["fake"] += peers.fake_prefix(template, tokenizer, drawn, turn) == expected
                counts["counted"] += peers.counted_ends(template, tokenizer, drawn, turn, truth) == expected
    turns = counts["turns"]
    return {
        "conversations": each * len(certified),
        "turns": turns,
        "truncated_share": counts["truncated"] / turns,
        "broken_prefixes": counts["broken"],
        "exact_share": counts["exact"] / turns,
        "rerendered_extends_share": counts["rerendered"] / turns,
        "fake_prefix_exact_share": counts["fake"] / turns,
        "counted_ends_exact_share": counts["counted"] / turns,
    }


def assault(certified: dict[str, tuple[ChatTemplate, Any]], attempts: int) -> dict[str, Any]:
    """Count control ids from content over attacks, distributed evenly over the templates."""
    each = -(-attempts // len(certified))
    leaked = 0
    for name, (template, _) in certified.items():
        shown, strings = Features.of(template), controls(template)
        for seed in range(each):
            random = Random(f"{name} {seed}")
            attempt = Attempt.of(lambda random=random, strings=strings: attack(random, strings), shown.tools)
            leaked += from_content(template, attempt, system=shown.system)
    return {"injection_attempts": each * len(certified), "control_ids_from_content": leaked}


def plain(real: Sequence[str], strings: int) -> dict[str, Any]:
    """Compare the ids of plain strings in a prompt with the tokenizer's own, for each real tokenizer."""
    equal = 0
    for name in real:
        template, tokenizer = zoo.template(name), zoo.tokenizer(name)
        random = Random(0)
        for _ in range(strings):
            message = user("".join(random.choices(LETTERS, k=random.randint(1, 40))))
            text = str.__str__(template.rendering.of_messages([message]))
            equal += template.first_prompt([message], None, None).ids.tolist() == encode(tokenizer, text)
    return {"plain_strings": strings * len(real), "plain_equal_share": equal / (strings * len(real))}


def speed(repeats: int) -> dict[str, Any]:
    """Measure CPU milliseconds of one delta: a tool result of 200 words under Qwen3, after contexts of two lengths.

    `tokenizer_ms` is what the `tokenizers` library takes for the words alone, in the same minute.
    """
    template = zoo.template("qwen3")
    [called] = calls(("look", {"at": "the door"}))
    random = Random(0)
    histories = {name: [user(" ".join(random.choices(WORDS, k=n)))] for name, n in CONTEXTS.items()}
    samples: dict[str, list[float]] = {name: [] for name in (*CONTEXTS, "tokenizer_ms")}
    tokenizer = zoo.tokenizer("qwen3")
    for _ in range(repeats):
        words = " ".join(random.choices(WORDS, k=200))
        started = time.process_time_ns()
        tokenizer.backend_tokenizer.encode(words, add_special_tokens=False)
        samples["tokenizer_ms"].append((time.process_time_ns() - started) / 1e6)
        shown = [results(words)]
        for name, history in histories.items():
            started = time.process_time_ns()
            template.delta(called, shown, template.closer_id, tool_specs=[], history=history)
            samples[name].append((time.process_time_ns() - started) / 1e6)
    return {name: statistics.median(values) for name, values in samples.items()} | {"delta_samples": samples}


def page(certified: dict[str, tuple[ChatTemplate, Any]], refused: dict[str, str]) -> str:
    """Write the table of all templates."""
    rows = ["| template | tokenizer | delta rendered | equal | refused | reasoning | rewrites its past |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, (template, _) in certified.items():
        kind = zoo.family(name).tokenizer if name in zoo.NAMES else ""
        certificate = template.certificate
        parts = sorted({line.split(":")[0] for line in certificate.rewrites})
        facts = (len(certificate.passed), len(certificate.refused), certificate.thinking, ", ".join(parts) or "no")
        rows.append(f"| {' | '.join(map(str, (name, kind or '(byte-level)', certificate.candidate, *facts)))} |")
    rows += [f"| {name} | refused: {why.splitlines()[0]} | | | | | |" for name, why in refused.items()]
    return "\n".join(rows)


def table(measured: dict[str, Any], refused: dict[str, str]) -> Table:
    """Return the table that is printed."""
    shown = Table("what", "value", title="Chat templates")
    for key, value in measured.items():
        if key not in ("delta_samples", "certify_s"):
            shown.add_row(key.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else str(value))
    for name, why in refused.items():
        shown.add_row(f"refused: {name}", why.splitlines()[0])
    return shown


def main() -> None:
    """Measure and print."""
    parser = options(__doc__)
    parser.add_argument("--page", action="store_true")
    arguments = parser.parse_args()
    sizes = ((10_000, 10_000, 5_000, 3_000), (250, 250, 150, 500), (2, 2, 2, 2))
    conversations, attempts, strings, repeats = sizes[arguments.size]
    names = (
        ("qwen3", *list(structures.STRUCTURES)[:1])
        if arguments.size == SMALLEST
        else (*zoo.TOOL_NAMES, *structures.STRUCTURES)
    )
    real = ("qwen3",) if arguments.size == SMALLEST else tuple(REAL.values())
    with Console(stderr=True).status("fetching and certifying"):
        made = certify(names)
    certified, refused = made.templates, made.refused
    if arguments.page:
        head, tail = PAGE.read_text(encoding="utf-8").split(BEGIN)[0], "\n<!-- end -->\n"
        PAGE.write_text(f"{head}{BEGIN}\n{page(certified, refused)}{tail}", encoding="utf-8")
        return
    native = [name for name in certified if name in zoo.NAMES and not name.endswith("_training")]
    measured = {"certified": len(certified), "refused": len(refused), "certified_native": len(native), **made.times()}
    measured |= (
        speed(repeats) | converse(certified, conversations) | assault(certified, attempts) | plain(real, strings)
    )
    report(arguments, measured | {"refusals": refused}, table(measured, refused))


if __name__ == "__main__":
    main()
