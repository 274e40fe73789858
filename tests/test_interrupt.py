"""Work that Ctrl-C stops: wherever it is, whatever it makes of being cancelled, and even if it never ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tito_core.interrupt import StoppableRunner, in_thread


@given(st.integers(1, 8), st.integers(0, 8), st.booleans(), st.booleans())
def test_a_stop_at_any_step_is_an_interrupt_and_nothing_runs_afterwards(
    steps: int, at: int, swallows: bool, fails: bool
) -> None:
    done: list[str] = []

    async def work(runner: StoppableRunner) -> str:
        try:
            for step in range(steps):
                if step == at:
                    runner.stop()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if fails:
                raise ValueError("of being cancelled") from None
            if not swallows:
                raise
        finally:
            done.append("ended")
        return "result"

    async def next_one() -> None:
        done.append("next")

    async def given_back() -> None:
        done.append("given back")

    with StoppableRunner() as runner:
        if at < steps:
            with pytest.raises(KeyboardInterrupt):
                runner.run(work(runner))
            with pytest.raises(KeyboardInterrupt):
                runner.run(next_one())
        else:
            assert runner.run(work(runner)) == "result"
        runner.close(given_back())
    assert done == ["ended", "given back"]


def test_a_stop_before_it_begins_lets_nothing_begin() -> None:
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    runner = StoppableRunner()
    runner.stop()
    with runner, pytest.raises(KeyboardInterrupt):
        runner.run(work())
    runner.stop()  # nor does one after its end do anything
    assert not begun


def test_work_in_a_thread_gives_what_it_gives() -> None:
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
        in_thread(lambda: (begin(), time.sleep(600)), lambda: print("asked", flush=True), interrupts)
    except KeyboardInterrupt:
        print("gave up", flush=True)
        %s
"""
OUTCOMES = {
    "nothing to lose": (
        "with Interrupts({signal.SIGINT: 9}, 'Nothing.'):\n    begin(); time.sleep(600)", 9, "", "Nothing.\n"
    ),
    "work that goes on": (STUBBORN % "leave(7)", 7, "asked\ngave up\n", ""),
    "work and command that go on": (STUBBORN % "time.sleep(600)", 9, "asked\ngave up\n", "This is known.\n"),
    "a library's caller": (
        "try:\n    in_thread(lambda: (begin(), time.sleep(600)), lambda: print('asked', flush=True))\n"
        "except KeyboardInterrupt:\n    sys.exit(6)",
        6, "asked\n", "",
    ),
}  # fmt: skip


def interrupted(program: str, *signals: int) -> tuple[int, str, str]:
    with subprocess.Popen(
        [sys.executable, "-u", "-c", BEGIN + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have it ignored
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.05)
        out, errors = process.communicate()
        return process.returncode, out, errors


@pytest.mark.parametrize("case", OUTCOMES)
def test_a_process_ends_whatever_its_work_does(case: str) -> None:
    program, status, out, errors = OUTCOMES[case]
    assert interrupted(program, signal.SIGINT) == (status, out, errors)


def test_a_second_signal_ends_it_at_once() -> None:
    program = "interrupt.GRACE_S = interrupt.LAST_S = 600\n" + STUBBORN % "leave(7)"
    status, out, errors = interrupted(program, signal.SIGINT, signal.SIGTERM)
    assert (status, out, errors) == (8, "asked\n", "This is known.\n")
