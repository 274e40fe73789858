"""A conversation that breaks a law, made smaller: fewer moves, and plainer ones, that break it all the same.

Hypothesis would try hundreds of conversations, which a real server takes an hour for; a few dozen show a person enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tito_conformance.laws import BrokenLawError
from tito_core.testing.moves import Move

Play = Callable[[tuple[Move, ...]], BrokenLawError | None]
"""Plays a conversation; gives the law that it breaks, or None."""
MOST_TRIES = 60
"""Conversations that are tried at most."""


def smaller(
    broken: BrokenLawError, moves: tuple[Move, ...], play: Play, tries: int = MOST_TRIES
) -> Iterator[tuple[BrokenLawError, tuple[Move, ...]]]:
    """Look for smaller and smaller conversations that break the same check.

    Args:
        broken: What was found.
        moves: The conversation that shows it.
        play: Plays another one.
        tries: How many are tried at most.

    Yields:
        What each that is found breaks, and that conversation; the last one is the smallest.
    """
    going = True
    while going:
        going = False
        for candidate in _candidates(moves):
            if tries == 0:
                return
            tries -= 1
            found = play(candidate)
            if found is not None and found.check is broken.check:
                moves, going = candidate, True
                yield found, moves
                break


def _candidates(moves: tuple[Move, ...]) -> Iterator[tuple[Move, ...]]:
    """Yield what is smaller, that which leaves out most first."""
    size = len(moves) // 2
    while size:
        for start in range(0, len(moves), size):
            yield moves[:start] + moves[start + size :]
        size //= 2
    for at, move in enumerate(moves):
        plain = type(move)()
        if move != plain:
            yield (*moves[:at], plain, *moves[at + 1 :])
