"""What a rollout does when the engine aborts a generation. backend/resume.py carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tito_core.backend.typed_values import InvalidValueError, at_least, short_repr

OnAbort = Literal["resume", "discard", "commit"]
"""Resume from the sampled tokens, raise an error, or keep the partial answer."""
MAX_RESUMES = 16
"""Default of `AbortPolicy.max_resumes`."""


@dataclass(frozen=True, slots=True)
class AbortPolicy:
    """What to do when the engine aborts a generation.

    Attributes:
        on_abort: See `OnAbort`.
        max_resumes: How often one answer is resumed at most.

    Raises:
        InvalidValueError: An unknown choice, or a negative number.
    """

    on_abort: OnAbort = "resume"
    max_resumes: int = MAX_RESUMES

    def __post_init__(self) -> None:
        if self.on_abort not in get_args(OnAbort):
            raise InvalidValueError(
                f"on_abort must be 'resume', 'discard' or 'commit', not {short_repr(self.on_abort)}."
            )
        at_least("max_resumes", self.max_resumes, 0)
