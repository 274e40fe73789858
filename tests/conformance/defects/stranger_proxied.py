"""The stranger's proxy in front of scripted servers on loopback, to try it without a real engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from conformance.defects.defect import SOUND, plant
from conformance.defects.stranger_hooks import Planted
from conformance.defects.stranger_proxy import Proxy
from conformance.defects.stranger_proxy_defects import DEFECTS
from conformance.defects.trial import Verdict, judge
from conformance.defects.views import EXPERTS
from tito_conformance.checks import Profile
from tito_conformance.target import Target
from tito_conformance.testing import ScriptedServer

_WIRES = ("proxy-vllm", "proxy-sglang")
_HARMLESS = {"event-lost": ("proxy-vllm",)}
"""Wires of defects that do nothing on the other: SGLang's events repeat what an earlier one held."""
PROXIES = [
    Planted(
        f"proxy-{name}",
        4,
        " ".join(str(made.__doc__).split()),
        real="gateways that edit bodies",
        wires=_HARMLESS.get(name, _WIRES),
    )
    for name, made in DEFECTS.items()
]


@contextmanager
def _serving(app: web.Application) -> Iterator[str]:
    """Serve on loopback from a thread, and yield the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    try:
        yield f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(start(), loop).result()}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def try_proxy(defect: Planted, wire: str, tokenizer: Any, end: int, profile: Profile, seed: int = 0) -> Verdict:
    """Run the suite on a sound scripted server behind the proxy."""
    kind = wire.removeprefix("proxy-")
    engine = plant(SOUND, kind, tokenizer, end)().engine  # type: ignore[attr-defined]
    made = DEFECTS[defect.name.removeprefix("proxy-")]()
    with ScriptedServer(engine) as server, _serving(Proxy(server.base_url, made).app()) as url:
        target = Target(kind, url, tokenizer, seed=seed, seeds=True, experts=EXPERTS)
        return judge(defect, wire, target, profile)
