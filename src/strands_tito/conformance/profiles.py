"""How much is played."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Numbers of one run.

    Attributes:
        name: As a user calls it.
        conversations: Conversations that are drawn.
        moves: Most moves of each.
        repeats: Requests of each fixed question, such as greedy twice.
    """

    name: str
    conversations: int
    moves: int
    repeats: int

    def sentence(self, tokens: int, *, weights: bool = False, both: bool = False) -> str:
        """Say beforehand what will be sent.

        Args:
            tokens: Most tokens of an ordinary answer.
            weights: Whether the server's weights are changed.
            both: Whether two servers are held against each other.
        """
        turns = self.conversations * self.moves
        return (
            f"Profile {self.name}: up to {self.conversations} conversations of up to {self.moves} turns, so at most "
            f"about {turns} generations of up to {tokens} tokens (some under a grammar, up to 200), and a score of "
            f"each rollout{', on both servers' if both else ''}."
            + (" The server's weights are changed, and stay so." if weights else "")
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
