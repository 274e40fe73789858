"""The rollout as lists, by the names that users of strands-vllm import."""

from strands_tito.compat.rollout import Token, TokenManager

__all__ = ["Token", "TokenManager"]
