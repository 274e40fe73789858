"""Which format a chat template shows: by marks that no other family writes, and never by a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DetectionError(ValueError):
    """A chat template shows no known format of calls, or more than one."""


@dataclass(frozen=True, slots=True)
class Detected:
    """A format that a template shows.

    Attributes:
        name: The parser's name.
        why: What shows it, as a sentence.
    """

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Marks:
    """A format is shown where a template has all of `has` and nothing of `lacks`."""

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def shown(self, template: str) -> bool:
        """Return whether a template shows the format."""
        return all(mark in template for mark in self.has) and not any(mark in template for mark in self.lacks)


_TABLE: dict[str, Marks] = {}
"""What shows each format, by the parser's name."""


def register_marks(name: str, marks: Marks) -> None:
    """Let templates that have certain marks show a format."""
    _TABLE[name] = marks


def detect_tool_parser(template: str) -> Detected:
    """Find the format that a chat template shows.

    Args:
        template: Its source.

    Raises:
        DetectionError: It shows none that is known, or several, which are named.
    """
    shown = sorted(name for name, marks in _TABLE.items() if marks.shown(template))
    if not shown:
        known = ", ".join(sorted(_TABLE))
        raise DetectionError(
            f"The chat template shows no format of tool calls that is known by its marks ({known}): name the parser, "
            "as in parser='hermes'; for a policy that calls no tools any will do."
        )
    if len(shown) > 1:
        names = " and ".join(map(repr, shown))
        raise DetectionError(
            f"The chat template shows {names}, and a guess could be wrong: name the parser, as in parser={shown[0]!r}."
        )
    [only] = shown
    has = " and ".join(map(repr, _TABLE[only].has))
    return Detected(only, f"The chat template has {has}, which only {only} writes.")


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the source of the chat template with tools; of several, "tool_use" or else "default".

    Raises:
        DetectionError: The tokenizer has none.
    """
    template: object = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    if not isinstance(template, str):
        raise DetectionError(
            "The tokenizer has no chat template, which would show the format: name the parser, as in parser='hermes'."
        )
    return template
