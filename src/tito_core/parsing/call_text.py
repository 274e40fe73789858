"""The text of one call, parsed, or the reason why it is malformed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEEPEST = 100
"""Maximum number of nested levels of lists and objects in a call; copying deeper ones overflows Python's stack."""

_NAME = re.compile(r"\w[\w./-]*")


def is_valid_name(name: str) -> bool:
    """Return whether a tool's name is valid where a format writes it without quotes."""
    return _NAME.fullmatch(name) is not None


class Malformed(Exception):
    """The text is not a valid call. It is reported and never repaired (law 9).

    Attributes:
        reason: A sentence for the policy.
        name: The tool's name, if the text gives it without doubt.
    """

    def __init__(self, reason: str, name: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.name = name


@dataclass(frozen=True, slots=True)
class ParsedCallText:
    """A valid call.

    Attributes:
        name: The tool's name.
        arguments: The decoded arguments.
        id: The call id that the policy wrote, in formats that have one.
        text: The arguments as sampled, in formats that write them as JSON.
        loose: How the call differs from the family's documentation, as a sentence; empty if it does not. A loose call
            still has exactly one reading.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    text: str | None = None
    loose: str = ""


def shortened(text: str, longest: int = 60) -> str:
    """Return the text in quotes, cut to `longest` characters."""
    return repr(text if len(text) <= longest else text[:longest] + "...")
