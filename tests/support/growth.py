"""How time grows with the size of an input. A bound in seconds would judge the machine that runs the test."""

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


def expect_linear(work: Callable[[int], object]) -> None:
    """Check that four times the work takes less than ten times as long: 4 if it is linear, 16 if it is quadratic.

    Compares CPU times of this process, so a slow machine does not matter; a noisy measurement is repeated.
    """

    def seconds(count: int) -> float:
        began = time.process_time()
        work(count)
        return time.process_time() - began

    ratios = []
    for _ in range(3):
        once = min(seconds(1), seconds(1))
        ratios.append(seconds(4) / once)
        if ratios[-1] < 10:
            return
    raise AssertionError(f"Four times the work takes {ratios} times as long.")


def opcodes(work: Callable[[], object]) -> int:
    """Return how many instructions of Python a piece of work takes; the same on every machine."""
    counted = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return counted
