"""A target with planted faults: its cases do what the runner must report."""

from __future__ import annotations

import os
import time
from random import Random

from fuzz.target import Finding, Outcome

NUMBERS = 6


class Planted:
    """Hangs, takes memory, dies or raises, at random."""

    def __init__(self, seed: int) -> None:
        self._held: list[bytes] = []
        self._number = -1

    def case(self, random: Random) -> Outcome:
        """Commit one of the faults, or none."""
        fault = random.randrange(NUMBERS)
        if fault == 1:
            time.sleep(60)
        elif fault == 2:
            self._held.append(b"x" * (160 << 20) + bytes([fault]))
        elif fault == 3:
            bytearray(8 << 30)
        elif fault == 4:
            os._exit(3)
        elif fault == 5:
            raise Finding("a planted finding")
        return "refused" if fault else "accepted"
