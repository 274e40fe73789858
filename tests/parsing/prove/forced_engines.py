"""Calls forced on a real engine are valid calls of the forced tool, with arguments that match its schema.

Starts the engine on this machine unless `--base-url` is given. Prints the number of valid calls, and the first faults.

    python tests/parsing/prove/forced_engines.py vllm --model smollm2 --calls 500 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import tito_engines as engines
from support.forced_calls import force
from tito_core import Policy
from tito_core.parsing import CallGrammar
from tito_engines import models


@contextlib.contextmanager
def address(options: argparse.Namespace) -> Iterator[str]:
    """Yield the server's address; start a server if none is given."""
    if options.base_url:
        yield options.base_url
    else:
        with engines.running_sync(options.backend, model=options.model) as url:
            yield url


class Unguarded:
    """The parser without `avoided_ids`, to see what an engine's grammar alone allows."""

    def __init__(self, parser: Any) -> None:
        self.start = parser.start
        self._grammar = parser.call_grammar

    def call_grammar(self, *arguments: Any) -> CallGrammar:
        """Return the grammar without its avoided ids."""
        return replace(self._grammar(*arguments), avoided_ids=())


def main() -> int:
    """Force calls and print the result; return 1 if a call was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=["vllm", "sglang"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--base-url", default="")
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unguarded", action="store_true", help="without the bias that keeps tags out of strings")
    options = parser.parse_args()
    with address(options) as url:
        tokenizer = models.load_tokenizer(options.model)
        policy = Policy.connect(backend=options.backend, base_url=url, tokenizer=tokenizer, timeout_s=300)
        if options.unguarded:
            policy = replace(policy, parser=Unguarded(policy.parser))
        began = time.monotonic()
        outcome = asyncio.run(force(policy, options.calls, options.seed))
        seconds = time.monotonic() - began
    print(f"{options.backend} {policy.info.version} {options.model}: {outcome}, {seconds:.0f} s")
    print(f"parser {policy.detected.name}, tools called: {dict(outcome.tools)}")
    print(*outcome.faults[:10], sep="\n")
    return 1 if outcome.found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
