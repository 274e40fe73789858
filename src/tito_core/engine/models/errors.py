"""What goes wrong when a model is looked for or built."""

from __future__ import annotations


class ModelUnavailable(RuntimeError):
    """A model or tokenizer cannot be had; the message says what is missing and what to do."""


class UnknownModel(ModelUnavailable):
    """The name is none of ours, no directory, and no `org/name` of a hub."""


class WrongHash(ModelUnavailable):
    """A fetched file is not the one that was pinned."""
