"""The rollout as lists, by the names that users of strands-sglang know."""

from tito_core.dropin.rollout import Rollout, Token

TokenManager = Rollout

__all__ = ["Rollout", "Token", "TokenManager"]
