"""Large runs over every certified tool template: conversations, attacks and plain strings.

    python tests/chat/prove/zoo.py (--conversations | --attacks | --strings) N [--seed S]

The templates of tests/support/zoo.py and tests/support/structures.py take turns. The first failure ends the run with
its template and number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support import structures, zoo
from support.attacks import Attempt, attack, controls, from_content
from support.conversations import user
from support.extending import broken_prefixes
from support.rollouts import Features, check, encode, rollout
from tito_core.chat.template import ChatTemplate

REAL = {"qwen3": "qwen3", "llama3": "llama3_1", "gptoss": "gptoss", "gemma3": "gemma3", "deepseek": "deepseekv3"}
"""Each real tokenizer and a template of its family."""
LETTERS = "abcdefghij XYZ 0123456789 .,;:!?'\"()-_/\\\n\t é日本語Ωß😀\u00a0{}="


def certified() -> list[tuple[str, ChatTemplate, Any]]:
    """Return (name, template, tokenizer) of each template that is certified with tools."""
    names = [*((name, zoo) for name in zoo.TOOL_NAMES), *((name, structures) for name in structures.STRUCTURES)]
    made = [(name, of.template(name), of.tokenizer(name)) for name, of in names]
    return [each for each in made if each[1].certificate.tools]


def numbered(count: int, seed: int) -> Iterator[tuple[str, ChatTemplate, Any, Random]]:
    """Yield `count` times a label, a template, its tokenizer and a random generator; the templates take turns."""
    templates = certified()
    for number in range(count):
        name, template, tokenizer = templates[number % len(templates)]
        yield f"{name}, number {number} of seed {seed}", template, tokenizer, Random(f"{seed} {number}")


def conversations(count: int, seed: int) -> None:
    """Check laws 1 and 7: each prompt extends the previous one and equals the template's rendering."""
    turns = truncated = 0
    for name, template, tokenizer, random in numbered(count, seed):
        chat = rollout(random, Features.of(template))
        if broken_prefixes(template, tokenizer, chat):
            raise SystemExit(f"{name}: a prompt does not begin with the one before and its completion")
        for turn, found, expected, truth in check(template, tokenizer, chat):
            turns += 1
            truncated += turn.opened is not None
            if found != expected:
                raise SystemExit(f"{name}: {tokenizer.decode(found)!r} is not {tokenizer.decode(expected)!r}, {truth}")
    print(f"{count} conversations: {turns} turns, {truncated} of them cut off")


def attacks(count: int, seed: int) -> None:
    """Check law 6: all control ids in prompts and deltas come from the template."""
    for name, template, _, random in numbered(count, seed):
        shown, strings = Features.of(template), controls(template)
        attempt = Attempt.of(lambda random=random, strings=strings: attack(random, strings), shown.tools)
        if from_content(template, attempt, system=shown.system):
            raise SystemExit(f"{name}: content made a control token: {attempt}")
    print(f"{count} attacks")


def strings(count: int, seed: int) -> None:
    """Check that plain content gives the tokenizer's own ids, with `count` strings for each real tokenizer."""
    for name in REAL.values():
        template, tokenizer, random = zoo.template(name), zoo.tokenizer(name), Random(f"{seed} {name}")
        for _ in range(count):
            message = user("".join(random.choices(LETTERS, k=random.randint(1, 40))))
            text = str.__str__(template.rendering.of_messages([message]))
            if template.first_prompt([message], None, None).ids.tolist() != encode(tokenizer, text):
                raise SystemExit(f"{name}: {message} gives other ids than the tokenizer's")
    print(f"{count} strings of each of {len(REAL)} tokenizers")


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    for run in (conversations, attacks, strings):
        chosen.add_argument(f"--{run.__name__}", type=int, metavar="N", help=(run.__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for run in (conversations, attacks, strings):
        if (count := getattr(arguments, run.__name__)) is not None:
            run(count, arguments.seed)


if __name__ == "__main__":
    main()
