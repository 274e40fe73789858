"""Errors of a collection."""

from __future__ import annotations


class CollectError(ValueError):
    """Rollouts cannot be collected with these arguments."""


class TaskError(CollectError):
    """A task is invalid, or has changed since its rollouts were collected."""


class AgentError(CollectError):
    """The agent cannot be imported, is not an agent, or returned an invalid value."""


class FolderError(CollectError):
    """The folder holds another collection, or another process writes to it."""


class TooManyFailuresError(CollectError):
    """Too many rollouts failed in a row."""
