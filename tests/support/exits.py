"""A process that ends during a generation. Usage: exits.py KIND BASE_URL WAY"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from support.backends import BACKENDS, request_of
from tito_core.backend.generate import generate

KIND, URL, WAY = sys.argv[1:]
BACKEND = BACKENDS[KIND](URL)


async def working() -> asyncio.Task[object]:
    """Start a generation, print a line, and wait for a line on stdin."""
    await BACKEND.connect()
    task: asyncio.Task[object] = asyncio.ensure_future(generate(BACKEND, request_of(request_id="left")))
    print("started", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    return task


def in_a_thread() -> None:
    """End the main thread; the loop of a daemon thread just stops."""
    ready = threading.Event()

    async def forever() -> None:
        task = await working()
        ready.set()
        await task

    threading.Thread(target=lambda: asyncio.run(forever()), daemon=True).start()
    ready.wait()


def loop_dropped() -> None:
    """Close a loop with the task in it."""
    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(working())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # a destroyed task is intended here
    del task


def loop_closed() -> None:
    """Close a loop with the task in it, keep the task, and wait for another line on stdin."""
    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(working())
    loop.close()
    sys.stdin.readline()
    assert not task.done()
    os._exit(0)  # without the aborts at exit


async def exits() -> None:
    """Call `sys.exit` in a coroutine."""
    await working()
    sys.exit(3)


async def raises() -> None:
    """Raise another error."""
    await working()
    raise RuntimeError("something else")


if WAY == "thread":
    in_a_thread()
elif WAY in ("loop", "closed"):
    {"loop": loop_dropped, "closed": loop_closed}[WAY]()
else:
    asyncio.run({"exit": exits, "error": raises}[WAY]())
