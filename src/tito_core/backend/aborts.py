"""What a rollout asks for where the engine was told to abort its generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tito_core.backend.typed_values import InvalidValueError, at_least, shown

OnAbort = Literal["resume", "discard", "commit"]
"""It goes on from its tokens, is an error, or is kept as it is."""
MAX_RESUMES = 16
"""How often one answer is asked for again by default."""


@dataclass(frozen=True, slots=True)
class Aborts:
    """What to do about aborts.

    Attributes:
        on_abort: See `OnAbort`.
        max_resumes: How often one answer is asked for again at most.

    Raises:
        InvalidValueError: No such choice, or a negative number.
    """

    on_abort: OnAbort = "resume"
    max_resumes: int = MAX_RESUMES

    def __post_init__(self) -> None:
        if self.on_abort not in get_args(OnAbort):
            raise InvalidValueError(f"on_abort must be 'resume', 'discard' or 'commit', not {shown(self.on_abort)}.")
        at_least("max_resumes", self.max_resumes, 0)


RESUMED = Aborts()
