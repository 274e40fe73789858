"""The rollout as lists, by the names that users of strands-vllm know."""

from tito_core.dropin.rollout import Rollout, Token

TokenManager = Rollout

__all__ = ["Token", "TokenManager"]
