"""A rollout's identity, and annotations such as its reward."""

from __future__ import annotations

import math
import uuid as uuid_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tito_core.ledger.json_equality import plain
from tito_core.ledger.vocabulary import VocabularyCheck

REWARD = "reward"
"""Name of the annotation that holds a rollout's reward."""


def as_reward(value: Any) -> float:
    """Return a reward as a float: a finite number of Python, NumPy or torch, or a bool.

    Raises:
        ValueError: It is something else, such as text, a list, or NaN.
    """
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):  # such as an array of several numbers
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"The reward {value!r:.200} is not a finite number: pass a float. Keep several scores, or text, as "
            "annotations of other names."
        )
    return number


def new_uuid() -> str:
    """Return a random UUID."""
    return str(uuid_module.uuid4())


@dataclass(frozen=True, slots=True)
class Header:
    """The identity of a rollout, fixed when it begins.

    Attributes:
        uuid: UUID in canonical form: lower case, 36 characters.
        group_id: Shared by the rollouts of one prompt, such as a GRPO group.
        task_id: The task of the rollout.
        tokenizer: Name of the policy's tokenizer. Viewers use it to decode tokens.
        user: The user's own JSON values.
        certificate: Certificate of the chat template that renders the prompts, with the hashes of template and
            tokenizer. None if unknown.
        vocabulary: How the tokenizer was compared with the server's. None if no policy made the ledger.

    Raises:
        ValueError: `uuid` is not a canonical UUID, or a value does not fit in JSON.
        TypeError: A name is not a string, or a value is not JSON.
    """

    uuid: str
    group_id: str | None = None
    task_id: str | None = None
    tokenizer: str | None = None
    user: Mapping[str, Any] = field(default_factory=dict)
    certificate: Mapping[str, Any] | None = None
    vocabulary: VocabularyCheck | None = None

    @property
    def media_ids(self) -> tuple[int, ...]:
        """Ids of media placeholders, as the certificate names them; empty if it names none."""
        listed = (self.certificate or {}).get("media_ids")
        listed = listed if isinstance(listed, Sequence) else ()  # a file may hold any JSON
        return tuple(token for token in listed if type(token) is int and 0 <= token < 2**31)

    def __post_init__(self) -> None:
        try:
            canonical = str(uuid_module.UUID(self.uuid))
        except (ValueError, AttributeError, TypeError):
            canonical = None
        if canonical is None or canonical != self.uuid:
            raise ValueError(f"{self.uuid!r} is not a canonical UUID, such as {new_uuid()}.")
        for name in ("group_id", "task_id", "tokenizer"):
            if not isinstance(value := getattr(self, name), str | None):
                raise TypeError(f"{name} is {value!r}; it must be a string, such as {str(value)!r}, or None.")
            plain(value, name)
        object.__setattr__(self, "user", plain(self.user, "user"))  # a copy, which the caller cannot change
        if self.certificate is not None:
            object.__setattr__(self, "certificate", plain(self.certificate, "certificate"))
        if self.vocabulary is not None:
            object.__setattr__(self, "vocabulary", VocabularyCheck(self.vocabulary))


@dataclass(frozen=True, slots=True)
class Annotation:
    """A value that is added to a rollout later. Annotations are only added; the last one of a name counts.

    Attributes:
        name: For example "reward" or "termination".
        value: JSON: a number, a string, a list, a mapping.
        turn: The turn that it describes, or None for the whole rollout.

    Raises:
        TypeError: The name is not a string, or the value is not JSON.
        ValueError: The value does not fit in JSON.
    """

    name: str
    value: Any
    turn: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"An annotation's name is {self.name!r}; it must be a string.")
        plain(self.name, "the name of an annotation")
        object.__setattr__(self, "value", plain(self.value, self.name))
