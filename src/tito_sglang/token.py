"""The rollout as lists, by the names that strands-sglang had before 0.4."""

from strands_tito.compat.rollout import Rollout, Token

TokenManager = Rollout

__all__ = ["Token", "TokenManager"]
