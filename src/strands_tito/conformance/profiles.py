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
        repeats: Number of fixed prompts.
    """

    name: str
    conversations: int
    moves: int
    repeats: int

    def describe(self, tokens: int, *, weights: bool = False, both: bool = False) -> str:
        """Return a sentence that says how much will be sent.

        Args:
            tokens: Limit of an ordinary answer, in tokens.
            weights: Whether the server's weights will change.
            both: Whether two servers are compared.
        """
        turns = self.conversations * self.moves
        return (
            f"Profile {self.name}: up to {self.conversations} conversations of up to {self.moves} turns: at most "
            f"about {turns} generations of up to {tokens} tokens (up to 200 under a grammar), and a score of "
            f"each rollout{', on both servers' if both else ''}."
            + (" The server's weights are changed, and are not restored." if weights else "")
        )


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quick", 8, 6, 2),
        Profile("standard", 40, 10, 4),
        Profile("deep", 400, 16, 8),
    )
}
"""The profiles by name."""
