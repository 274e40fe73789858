"""The rollout as lists, by the names that users of strands-vllm import."""

from strands_tito.compat.rollout import Rollout, Token

TokenManager = Rollout

__all__ = ["Token", "TokenManager"]
