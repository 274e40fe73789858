from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import tito_engines as engines
from support.fake_engine import processes_of
from tito_engines import EngineSpec, StartFailed, models

pytestmark = pytest.mark.usefixtures("fake_env")


async def test_a_block_has_a_server_and_leaves_none_and_the_loop_lives(
    fake: EngineSpec, model: Path, cache: Path
) -> None:
    """Counted, not timed: a machine may be slow, but a loop that was blocked would not turn at all."""
    turns, done = 0, False

    async def turn() -> None:
        nonlocal turns
        while not done:
            await asyncio.sleep(0.01)
            turns += 1

    turning = asyncio.create_task(turn())
    async with engines.running(fake, model=model) as url, httpx.AsyncClient() as client:
        while_starting, turns = turns, 0
        assert (await client.get(url + "/health")).status_code == 200
        turns = 0
    while_stopping, done = turns, True
    assert processes_of(cache) == []
    await turning
    assert while_starting > 20
    assert while_stopping > 5


@pytest.mark.parametrize("after_s", [0.05, 0.6])
async def test_cancelling_a_start_leaves_nothing(fake: EngineSpec, model: Path, cache: Path, after_s: float) -> None:
    async def use() -> None:
        async with engines.running(fake, model=model, server_args=["--deaf"], timeout_s=3600):
            pass

    task = asyncio.create_task(use())
    await asyncio.sleep(after_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_of(cache) == []


async def test_cancelling_the_block_stops_the_server(fake: EngineSpec, model: Path, cache: Path) -> None:
    inside = asyncio.Event()

    async def use() -> None:
        async with engines.running(fake, model=model):
            inside.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(use())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_of(cache) == []


async def test_a_failed_start_is_one_error(fake: EngineSpec, model: Path) -> None:
    with pytest.raises(StartFailed, match="out of ideas"):
        async with engines.running(fake, model=model, server_args=["--fail", "out of ideas"]):
            pass


def test_without_a_loop_an_error_in_the_block_stops_the_server(fake: EngineSpec, model: Path, cache: Path) -> None:
    with pytest.raises(ZeroDivisionError), engines.running_sync(fake, model=model) as url:  # noqa: PT012
        assert httpx.get(url + "/health").status_code == 200
        raise ZeroDivisionError
    assert processes_of(cache) == []


def test_a_name_is_a_model_of_ours_and_goes_by_that_name(
    fake: EngineSpec, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def ensure(name: str, python: Path, *, progress: object = None) -> Path:
        calls.append((name, python.name))
        return model

    monkeypatch.setattr(models, "ensure", ensure, raising=False)
    up = engines.bring_up(fake, "smollm2")
    engines.stop(up)
    assert up.model == "smollm2"
    assert calls == [("smollm2", "python")]


def test_without_psutil_everything_else_works_and_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules |= {'psutil': None, 'httpx': None}\n"
        "import strands_tito.cli, tito_engines as engines\n"
        "from tito_engines import cli, models, process\n"
        "for use in (lambda: engines.bring_up('vllm'), lambda: process.find_process(1, 0.0)):\n"
        "    try: use()\n"
        "    except engines.CannotInstall as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stdout.count("psutil, which is not installed: run pip install '.[engines]'") == 2, ended.stderr
