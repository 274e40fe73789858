"""Ctrl-C stops work at any point, however the work reacts to its cancellation, and even if it never ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tito_core.interrupt import StoppableRunner, in_thread


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(0, 8), st.booleans(), st.booleans())
def test_stop_at_any_step_raises_keyboardinterrupt_and_nothing_runs_afterwards(
    steps: int, at: int, swallows: bool, fails: bool
) -> None:
    events: list[str] = []

    async def work(runner: StoppableRunner) -> str:
        try:
            for step in range(steps):
                if step == at:
                    runner.stop()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if fails:
                raise ValueError("cancelled") from None
            if not swallows:
                raise
        finally:
            events.append("ended")
        return "result"

    async def next_one() -> None:
        events.append("next")

    async def release() -> None:
        events.append("released")

    with StoppableRunner() as runner:
        if at < steps:
            with pytest.raises(KeyboardInterrupt):
                runner.run(work(runner))
            with pytest.raises(KeyboardInterrupt):
                runner.run(next_one())
        else:
            assert runner.run(work(runner)) == "result"
        runner.close(release())
    assert events == ["ended", "released"]


def test_after_stop_no_work_begins() -> None:
    started: list[int] = []

    async def work() -> None:
        started.append(1)

    runner = StoppableRunner()
    runner.stop()
    with runner, pytest.raises(KeyboardInterrupt):
        runner.run(work())
    runner.stop()  # after the end, it has no effect
    assert not started


def test_in_thread_returns_the_result_or_raises_the_error() -> None:
    assert in_thread(lambda: threading.current_thread() is threading.main_thread(), pytest.fail) is False
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 / 0, pytest.fail)


BEGIN = """
import signal, sys, threading, time
from tito_core import interrupt
from tito_core.interrupt import Interrupts, in_thread, leave
interrupt.GRACE_S, interrupt.LAST_S = 0.2, 0.3
begin = lambda: print("begun", flush=True)
"""
STUBBORN = """
with Interrupts({signal.SIGINT: 9, signal.SIGTERM: 8}, "Nothing.", lambda: "This is known.") as interrupts:
    try:
        in_thread(lambda: (begin(), time.sleep(600)), lambda: print("stopping", flush=True), interrupts)
    except KeyboardInterrupt:
        print("gave up", flush=True)
        %s
"""
OUTCOMES = {
    "nothing to lose": (
        "with Interrupts({signal.SIGINT: 9}, 'Nothing.'):\n    begin(); time.sleep(600)", 9, "", "Nothing.\n"
    ),
    "work that does not stop": (STUBBORN % "leave(7)", 7, "stopping\ngave up\n", ""),
    "work and command that do not stop": (STUBBORN % "time.sleep(600)", 9, "stopping\ngave up\n", "This is known.\n"),
    "a library's caller": (
        "try:\n    in_thread(lambda: (begin(), time.sleep(600)), lambda: print('stopping', flush=True))\n"
        "except KeyboardInterrupt:\n    sys.exit(6)",
        6, "stopping\n", "",
    ),
}  # fmt: skip


def interrupted(program: str, *signals: int) -> tuple[int, str, str]:
    with subprocess.Popen(
        [sys.executable, "-u", "-c", BEGIN + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may ignore the signal
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.05)
        out, errors = process.communicate()
        return process.returncode, out, errors


@pytest.mark.parametrize("case", OUTCOMES)
def test_a_process_ends_after_a_signal(case: str) -> None:
    program, status, out, errors = OUTCOMES[case]
    assert interrupted(program, signal.SIGINT) == (status, out, errors)


def test_a_second_signal_ends_the_process_at_once() -> None:
    program = "interrupt.GRACE_S = interrupt.LAST_S = 600\n" + STUBBORN % "leave(7)"
    status, out, errors = interrupted(program, signal.SIGINT, signal.SIGTERM)
    assert (status, out, errors) == (8, "stopping\n", "This is known.\n")


def test_a_fork_does_not_inherit_the_handlers() -> None:
    """A tool may stop its own processes by SIGTERM, as multiprocessing does."""
    program = """
import os, signal, time
from tito_core.interrupt import Interrupts
with Interrupts({signal.SIGTERM: 8}, "Nothing.") as interrupts, interrupts.calling(lambda: None):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, b"x")
        time.sleep(3)
        os._exit(0)
    os.read(reads, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), interrupts.received)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", "-c", program]
    assert subprocess.check_output(command, text=True, env=environment) == f"-{signal.SIGTERM.value} None\n"
