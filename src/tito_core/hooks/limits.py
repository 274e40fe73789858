"""What says that an agent's loop reached a limit, by the names that users of strands-sglang catch."""

from __future__ import annotations

from strands.types.exceptions import EventLoopException


class LoopLimitReachedError(EventLoopException):
    """An agent's loop reached a limit and ended at a complete message: every call in its history has its result.

    Strands lets an `EventLoopException` out of its loop as it is, and wraps any other error in one; so this is one, and
    whoever unwraps it finds it again as its own `original_exception`.

    Args:
        allowed: The limit; or a whole sentence, as code that makes such errors itself, and pickle, give it.
        reached: The count that reached it; as many as are allowed when None.

    Attributes:
        allowed: The limit.
        reached: The count that reached it.
    """

    counted = "steps"

    def __init__(self, allowed: int | str, reached: int | None = None) -> None:
        reached = reached if isinstance(allowed, str) or reached is not None else allowed
        sentence = f"The agent's loop has {reached} {self.counted}, and {allowed} are allowed: it ends here."
        super().__init__(Exception(allowed if isinstance(allowed, str) else sentence))
        self.original_exception = self
        self.allowed = allowed
        self.reached = reached


class MaxToolIterationsReachedError(LoopLimitReachedError):
    """The results of the last iteration that is allowed are in the history."""

    counted = "tool iterations"


class MaxToolCallsReachedError(LoopLimitReachedError):
    """The results of the last call that is allowed are in the history, and those of its siblings."""

    counted = "tool calls"


class MaxMessagesReachedError(LoopLimitReachedError):
    """The last message that is allowed is in the history, and the model would be asked next."""

    counted = "messages"


class MaxSampledTokensReachedError(LoopLimitReachedError):
    """The policy has sampled all the tokens that are allowed, and would be asked next."""

    counted = "sampled tokens"
