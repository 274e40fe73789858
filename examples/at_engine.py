"""The examples' command line: run on an engine that is started here, or on a running server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import tito_engines as engines
from strands_tito import Policy
from strands_tito.errors import TITOError
from tito_core import store
from tito_core.ledger import Ledger
from tito_engines import models
from tito_engines.terminal import VisibleConsole, stages_shown

console = Console(width=None if sys.stdout.isatty() else 118)


def run(example: Callable[[Policy], Coroutine[Any, Any, object]], description: str | None) -> None:
    """Run an example on the server at `--base-url`, or on one that is started here."""
    run_parsed(lambda policy, _: example(policy), options(description), dev_mode=True)


def options(description: str | None, model: str = "smollm2") -> argparse.ArgumentParser:
    """Return a parser of the options that name a server, to which an example adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="vllm", help="vllm, sglang or another installed backend")
    parser.add_argument("--model", default=model, help="model that a local engine runs")
    parser.add_argument("--base-url", default="", help="address of a running server; default: start one here")
    parser.add_argument("--tokenizer", default="", help="tokenizer of that server's model; default: --model's")
    parser.add_argument("--torch-index", default=None, help="package index with CPU builds of torch, if pip needs one")
    return parser


def write(ledgers: Sequence[Ledger], folder: str, name: str) -> None:
    """Write rollouts to a new file, and print the command that shows it; in a clone that is no command of the shell."""
    path = Path(folder, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.tito")
    path.parent.mkdir(parents=True, exist_ok=True)
    store.append(path, ledgers)
    tito = "tito" if shutil.which("tito") else os.path.relpath(Path(sys.executable).with_name("tito"))
    command = f"{tito} view {shlex.quote(str(path))}"
    console.print(f"Rollouts written to {path}. Look at them with:\n    {command}", markup=False, soft_wrap=True)


def run_parsed(
    example: Callable[[Policy, argparse.Namespace], Coroutine[Any, Any, object]],
    parser: argparse.ArgumentParser,
    *,
    dev_mode: bool = False,
) -> None:
    """Parse the command line, and run an example with its arguments.

    Args:
        example: The example.
        parser: What `options` returned, with the example's own options.
        dev_mode: Whether an engine that is started here can change its weights.
    """
    arguments = parser.parse_args()
    # Strands logs an error for each malformed call, because no tool has its name; a small model makes many.
    logging.getLogger("strands.tools").setLevel(logging.CRITICAL)
    try:
        with contextlib.ExitStack() as stack:
            url = arguments.base_url
            if not url:
                with engines.on_console() as show_progress:
                    started = engines.running_sync(
                        arguments.backend, model=arguments.model, torch_index=arguments.torch_index,
                        dev_mode=dev_mode, on_progress=show_progress,
                    )  # fmt: skip
                    url = stack.enter_context(started)
            tokenizer = arguments.tokenizer or models.load_tokenizer(arguments.model)
            # Standard output holds only an example's result; progress goes to standard error.
            with stages_shown(VisibleConsole(stderr=True)):
                policy = Policy.connect(backend=arguments.backend, base_url=url, tokenizer=tokenizer)
            asyncio.run(example(policy, arguments))
    except TITOError as error:
        sys.exit(f"{type(error).__name__}: {error}")
