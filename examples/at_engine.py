"""The examples' command line: run on an engine that is started here, or on a running server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from strands_tito import Policy, engines
from strands_tito.engines import models
from strands_tito.inspect import summary as report


def run(example: Callable[[Policy], Coroutine[Any, Any, object]], description: str | None) -> None:
    """Run an example on the server at `--base-url`, or on one that is started here."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="vllm", help="vllm, sglang or another installed backend")
    parser.add_argument("--model", default="smollm2", help="model that a local engine runs")
    parser.add_argument("--base-url", default="", help="address of a running server; default: start one here")
    parser.add_argument("--tokenizer", default="", help="tokenizer of that server's model; default: --model's")
    arguments = parser.parse_args()
    logging.getLogger("strands.tools").setLevel(logging.CRITICAL)  # a small model makes many malformed calls
    try:
        with contextlib.ExitStack() as stack:
            url = arguments.base_url
            if not url:
                with engines.on_console() as show_progress:
                    started = engines.running_sync(
                        arguments.backend, model=arguments.model, dev_mode=True, on_progress=show_progress
                    )
                    url = stack.enter_context(started)
            tokenizer = arguments.tokenizer or models.load_tokenizer(arguments.model)
            policy = Policy.connect(backend=arguments.backend, base_url=url, tokenizer=tokenizer)
            asyncio.run(example(policy))
    except report.EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
