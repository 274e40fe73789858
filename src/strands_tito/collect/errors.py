"""What can be wrong with a collection: each a sentence for a person."""

from __future__ import annotations


class CollectError(ValueError):
    """Rollouts cannot be collected as asked."""


class TaskError(CollectError):
    """A task is none, or not the one that it was."""


class AgentError(CollectError):
    """What was named as an agent is none, or what it gave is nothing that can be kept."""


class FolderError(CollectError):
    """The folder holds something else, or another process is at work in it."""


class TooManyFailuresError(CollectError):
    """Rollouts fail one after the other: the engine or the agent needs mending before it makes sense to go on."""
