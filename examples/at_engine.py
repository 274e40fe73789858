"""What the examples share: a command line, and an engine on this machine or a server of yours."""

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
    """Run an example on `--backend`, on a server that is started here, or on the one at `--base-url`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="vllm", help="vllm, sglang or another installed backend")
    parser.add_argument("--model", default="smollm2", help="model that a local engine runs")
    parser.add_argument("--base-url", default="", help="a running server; without it one is started here")
    parser.add_argument("--tokenizer", default="", help="tokenizer of that server's model; default: --model's")
    arguments = parser.parse_args()
    logging.getLogger("strands.tools").setLevel(logging.CRITICAL)  # a small model's malformed calls are no news
    try:
        with contextlib.ExitStack() as stack:
            url = arguments.base_url
            if not url:
                with engines.on_console() as say:
                    started = engines.running_sync(
                        arguments.backend, model=arguments.model, dev_mode=True, on_progress=say
                    )
                    url = stack.enter_context(started)
            tokenizer = arguments.tokenizer or models.load_tokenizer(arguments.model)
            policy = Policy.connect(backend=arguments.backend, base_url=url, tokenizer=tokenizer)
            asyncio.run(example(policy))
    except report.EXPECTED_ERRORS as error:
        sys.exit(f"{type(error).__name__}: {error}")
