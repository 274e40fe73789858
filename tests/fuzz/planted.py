"""A class whose cases do what must be found, one after the other."""

from __future__ import annotations

import os
import time
from random import Random

from fuzz.target import Finding, Outcome

NUMBERS = 6


class Planted:
    """Hangs, grows, dies and raises, by the case's number."""

    def __init__(self, seed: int) -> None:
        self._held: list[bytes] = []
        self._number = -1

    def case(self, random: Random) -> Outcome:
        """Do one of them."""
        which = random.randrange(NUMBERS)
        if which == 1:
            time.sleep(60)
        elif which == 2:
            self._held.append(b"x" * (160 << 20) + bytes([which]))
        elif which == 3:
            bytearray(8 << 30)
        elif which == 4:
            os._exit(3)
        elif which == 5:
            raise Finding("a promise is not kept")
        return "refused" if which else "accepted"
