"""The rollout as lists, by the older names of strands-sglang."""

from tito_sglang.rollout import Token, TokenManager

__all__ = ["Token", "TokenManager"]
