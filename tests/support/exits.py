"""A process that ends during a generation. Usage: exits.py KIND BASE_URL WAY"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from support.backends import BACKENDS, request_of
from tito_core.backend.generate import generate

KIND, URL, WAY = sys.argv[1:]
BACKEND = BACKENDS[KIND](URL)


async def exits() -> None:
    """Leave the event loop during a generation, after a line on stdin, as `WAY` says."""
    await BACKEND.connect()
    running = asyncio.ensure_future(generate(BACKEND, request_of(request_id="left")))
    print("started", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    if WAY == "fork" and os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    if WAY == "fork":  # it lives on with a copy of the connection, until a second line
        print("forked", flush=True)
        sys.stdin.readline()
        os._exit(0)
    assert not running.done()
    sys.exit(3)


asyncio.run(exits())
