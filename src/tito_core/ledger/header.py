"""What a rollout is called, and what is said of it afterwards."""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tito_core.ledger.json_equality import plain
from tito_core.ledger.vocabulary import VocabularyCheck


def new_uuid() -> str:
    """Return a random identity."""
    return str(uuid_module.uuid4())


@dataclass(frozen=True, slots=True)
class Header:
    """The identity of a rollout, fixed when it begins.

    Attributes:
        uuid: Unique, in the usual 36-character form.
        group_id: Rollouts of one prompt share it, such as a GRPO group.
        task_id: The task that the rollout tries.
        tokenizer: Name of the policy's tokenizer, so that a reader can show tokens as text.
        user: Anything JSON that the user wants kept.
        certificate: What was found of the chat template that its prompts are written with: its hash, the tokenizer's,
            and the rest of its certificate. None where nobody said.
        vocabulary: How the tokenizer was compared with the server's. None where no policy made the ledger.
    """

    uuid: str
    group_id: str | None = None
    task_id: str | None = None
    tokenizer: str | None = None
    user: Mapping[str, Any] = field(default_factory=dict)
    certificate: Mapping[str, Any] | None = None
    vocabulary: VocabularyCheck | None = None

    def __post_init__(self) -> None:
        try:
            canonical = str(uuid_module.UUID(self.uuid))
        except (ValueError, AttributeError, TypeError):
            canonical = None
        if canonical is None or canonical != self.uuid:
            raise ValueError(f"{self.uuid!r} is not a canonical UUID, such as {new_uuid()}.")
        for name in ("group_id", "task_id", "tokenizer"):
            if not isinstance(found := getattr(self, name), str | None):
                raise TypeError(f"{name} is {found!r}; it must be a string, such as {str(found)!r}, or None.")
            plain(found, name)
        object.__setattr__(self, "user", plain(self.user, "user"))  # a copy, which nobody changes afterwards
        if self.certificate is not None:
            object.__setattr__(self, "certificate", plain(self.certificate, "certificate"))
        if self.vocabulary is not None:
            object.__setattr__(self, "vocabulary", VocabularyCheck(self.vocabulary))


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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"An annotation's name is {self.name!r}; it must be a string.")
        plain(self.name, "the name of an annotation")
        object.__setattr__(self, "value", plain(self.value, self.name))
