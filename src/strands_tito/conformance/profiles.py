"""How much a run plays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """The size of a run.

    Attributes:
        name: Value of `--profile`.
        conversations: Number of random conversations.
        moves: Largest number of moves in each.
        repeats: Number of fixed prompts; the number of samples grows with it, too.
    """

    name: str
    conversations: int
    moves: int
    repeats: int

    def most_requests(self, *, weights: bool = False, both: bool = False) -> int:
        """Return how many generations and scores a run sends at most; see `describe`."""
        playing = self.conversations * self.moves * REQUESTS_OF_A_MOVE
        if both:
            return 2 * playing
        return playing + REQUESTS_OF_A_REPEAT * self.repeats + OTHER_REQUESTS + WEIGHT_REQUESTS * weights

    def describe(self, tokens: int, *, weights: bool = False, both: bool = False) -> str:
        """Return a sentence that says how much will be sent.

        Args:
            tokens: Limit of an ordinary answer, in tokens.
            weights: Whether the server's weights will change.
            both: Whether two servers are compared.
        """
        requests = self.most_requests(weights=weights, both=both)
        longest = "" if both else ", and a few long prompts of up to 4,096 tokens"
        return (
            f"Profile {self.name}: up to {self.conversations} conversations of up to {self.moves} moves, at most "
            f"{requests:,} requests{' on both servers together' if both else ''}: generations of up to {tokens} tokens "
            f"(96 where calls may come, 200 under a grammar), scores of them{longest}. The search for a "
            f"smaller conversation after a failure comes on top."
            + (" The server's weights are changed, and are not restored." if weights else "")
        )


REQUESTS_OF_A_MOVE = 2
"""Generations and scores of a move: the mean is 1.3, so no run of dozens of moves has more."""
REQUESTS_OF_A_REPEAT = 170
"""Of a fixed prompt in all its ways, and of the samples that are judged."""
OTHER_REQUESTS = 192
"""Of the connection and of the checks that no profile repeats. Answers that end early need fewer."""
WEIGHT_REQUESTS = 40
"""Of weight updates between fixed prompts."""
PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quick", 8, 6, 2),
        Profile("standard", 40, 10, 4),
        Profile("deep", 400, 16, 8),
    )
}
"""The profiles by name."""
