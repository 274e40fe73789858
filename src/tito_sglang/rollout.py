"""The rollout as lists, by the name that users of strands-sglang know."""

from tito_core.dropin.rollout import Rollout

__all__ = ["Rollout"]
