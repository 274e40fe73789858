"""The rollout as lists, by the name that users of strands-sglang import."""

from strands_tito.compat.rollout import Rollout

__all__ = ["Rollout"]
