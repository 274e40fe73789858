"""The engines' routers, from the package index, as engines that `tito_engines` installs and starts.

A router's model is any folder, and its server arguments are the workers' addresses.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tito_engines import install, process
from tito_engines.process import free_port
from tito_engines.spec import EngineSpec, Launch

MINORS = ("3.11", "3.12", "3.13", "3.14")
POLICIES = {"sglang-router": "manual", "smg": "consistent_hashing", "vllm-router": "consistent_hash"}
"""The policies that keep a session on one worker."""
WORKERS = {"sglang-router": "sglang", "smg": "sglang", "vllm-router": "vllm"}
"""The engine of each router's workers."""
_SERVED = """\
aiohappyeyeballs==2.7.1
aiohttp==3.14.5
aiosignal==1.4.0
annotated-doc==0.0.7
annotated-types==0.8.0
anyio==4.16.0
attrs==26.1.0
certifi==2026.10.19.post1
charset-normalizer==3.5.3
click==8.5.1
fastapi==0.165.0
frozenlist==1.8.0
h11==0.16.0
idna==3.20
multidict==7.2.1
opentelemetry-api==1.45.2
orjson==3.13.0
propcache==0.5.4
pydantic==2.14.4
pydantic_core==2.50.5
requests==2.34.2
starlette==1.10.0
typing-inspection==0.4.5
typing_extensions==4.16.0
urllib3==2.8.0
uvicorn==0.54.0
yarl==1.25.1
"""
"""What the launchers of two of them import, though the routers themselves are one compiled file."""
_SOON_S = 60.0


def _spec(name: str, version: str, module: str, *words: str, needs: str = _SERVED) -> EngineSpec:
    lock = f"# disk: 150 MB\n{name}=={version}\nsetproctitle==1.3.8\n{needs}"

    def command(launch: Launch) -> list[str]:
        own = ["--host", launch.host, "--port", str(launch.port), "--prometheus-port", str(free_port())]
        urls = ["--worker-urls", *launch.server_args]
        return [str(launch.python), "-m", module, *words, *own, "--policy", POLICIES[name], *urls]

    return EngineSpec(
        name=name,
        title=f"{name} {version}",
        locks=dict.fromkeys(MINORS, lock),
        command=command,
        env=lambda _: {},
        import_check=f"import {module}",
        health_path="/readiness",
        ready_timeout_s=60,
        grace_s=2,
    )


ROUTERS = {
    "sglang-router": _spec("sglang-router", "0.3.2", "sglang_router.launch_router"),
    "smg": _spec("smg", "1.13.0", "smg.cli", "launch", needs=""),
    "vllm-router": _spec("vllm-router", "0.1.17", "vllm_router.launch_router"),
}


@contextmanager
def routed(name: str, workers: Sequence[str], folder: Path) -> Iterator[str]:
    """Run a router before workers; yields its address when it knows all of them."""
    router = process.start(install.ensure(ROUTERS[name]), folder, server_args=workers)
    try:
        until = time.monotonic() + _SOON_S
        while (known := _known(router.url)) < len(workers):
            assert time.monotonic() < until, f"{name} knows {known} of {workers}: {process.tail(router.log)}"
            time.sleep(0.1)
        yield router.url
    finally:
        process.stop(router)


def _known(url: str) -> int:
    with urllib.request.urlopen(f"{url}/workers", timeout=10) as answer:
        return sum(worker["is_healthy"] for worker in json.load(answer)["workers"])
