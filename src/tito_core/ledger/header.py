"""What a rollout is called, and what is said of it afterwards."""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def new_uuid() -> str:
    """Give a random identity."""
    return str(uuid_module.uuid4())


@dataclass(frozen=True, slots=True)
class Header:
    """The identity of a rollout, fixed when it begins.

    Attributes:
        uuid: Unique; random when not given. In the usual 36-character form.
        group_id: Rollouts of one prompt share it, such as a GRPO group.
        task_id: The task that the rollout tries.
        tokenizer: Name of the policy's tokenizer, so that a reader can show tokens as text.
        user: Anything JSON that the user wants kept.
    """

    uuid: str = field(default_factory=new_uuid)
    group_id: str | None = None
    task_id: str | None = None
    tokenizer: str | None = None
    user: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            canonical = str(uuid_module.UUID(self.uuid))
        except (ValueError, AttributeError, TypeError):
            canonical = None
        if canonical != self.uuid:
            raise ValueError(f"{self.uuid!r} is no UUID in its usual form, such as {new_uuid()}.")


@dataclass(frozen=True, slots=True)
class Annotation:
    """Something said of a rollout after the fact. Annotations are only ever added; of one name the last one counts.

    Attributes:
        name: Such as "reward" or "termination".
        value: JSON: a number, a string, a list, a mapping.
        turn: The turn that it is about, or None for the whole rollout.
    """

    name: str
    value: Any
    turn: int | None = None
