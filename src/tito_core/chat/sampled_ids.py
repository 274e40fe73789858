"""Call ids as the policy wrote them (Kimi, Mistral), kept inside ours: templates echo theirs, and ours are unique."""

from __future__ import annotations

import re

_OURS = re.compile(r"call_[0-9a-f]{8}_[0-9]+\.(.+)", re.DOTALL)


def with_sampled_id(call_id: str, sampled: str | None) -> str:
    """Give the `toolUseId` for a call of ours that the policy gave an id, or none."""
    return f"{call_id}.{sampled}" if sampled else call_id


def sampled_id(tool_use_id: str) -> str:
    """Give the id that a template is to write: the policy's own where it wrote one, else all of it."""
    ours = _OURS.fullmatch(tool_use_id)
    return ours[1] if ours else tool_use_id
