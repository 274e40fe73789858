"""What one call says, or why it says nothing for certain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"\w[\w./-]*")


def is_sound_name(name: str) -> bool:
    """Return whether a tool may have this name where a format writes it without quotes."""
    return _NAME.fullmatch(name) is not None


class Malformed(Exception):
    """The tokens say no sound call (law 9): nothing is repaired.

    Attributes:
        reason: A sentence for the policy to read.
        name: The tool's name, where the tokens say it for certain.
    """

    def __init__(self, reason: str, name: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.name = name


@dataclass(frozen=True, slots=True)
class ParsedCallText:
    """A sound call.

    Attributes:
        name: The tool's name.
        arguments: Its arguments.
        id: The id that the policy wrote, in formats that have one.
        text: The arguments as the policy wrote them, where that is JSON.
        loose: How it differs from what the family documents, as a sentence; empty where it does not. Its reading is
            still the only one.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    text: str | None = None
    loose: str = ""


def shortened(text: str, longest: int = 60) -> str:
    """Quote a text, cut to a length."""
    return repr(text if len(text) <= longest else text[:longest] + "...")
