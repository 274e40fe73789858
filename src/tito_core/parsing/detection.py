"""Detect the tool-call format of a chat template by text that only one family writes. Never guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DetectionError(ValueError):
    """A chat template matches no known tool-call format, or more than one."""


@dataclass(frozen=True, slots=True)
class Detected:
    """The format that was chosen.

    Attributes:
        name: The parser's name.
        why: The reason, as a sentence.
    """

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Marks:
    """A template matches a format if it contains all of `has` and none of `lacks`."""

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def match(self, template: str) -> bool:
        """Return whether a template matches."""
        return all(mark in template for mark in self.has) and not any(mark in template for mark in self.lacks)


_TABLE: dict[str, Marks] = {}
"""The marks of each format, by parser name."""


def register_marks(name: str, marks: Marks) -> None:
    """Register the marks of a format."""
    _TABLE[name] = marks


def detect_tool_parser(template: str) -> Detected:
    """Detect the tool-call format of a chat template.

    Args:
        template: The template's source.

    Raises:
        DetectionError: It matches no known format, or several.
    """
    names = sorted(name for name, marks in _TABLE.items() if marks.match(template))
    if not names:
        known = ", ".join(sorted(_TABLE))
        raise DetectionError(
            f"The chat template matches no tool-call format that can be detected ({known}). Name the parser, as in "
            "parser='hermes'; a policy that calls no tools can use any."
        )
    if len(names) > 1:
        raise DetectionError(
            f"The chat template matches several tool-call formats: {' and '.join(map(repr, names))}. Name the parser, "
            f"as in parser={names[0]!r}."
        )
    [only] = names
    has = " and ".join(map(repr, _TABLE[only].has))
    return Detected(only, f"The chat template has {has}, which only {only} writes.")


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the source of the chat template; of several templates, "tool_use" or else "default".

    Raises:
        DetectionError: The tokenizer has no such template.
    """
    template: object = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    if not isinstance(template, str):
        raise DetectionError(
            "The tokenizer has no chat template, so the tool-call format cannot be detected. Name the parser, as in "
            "parser='hermes'."
        )
    return template
