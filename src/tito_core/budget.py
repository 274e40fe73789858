"""A bound on the tokens of a trajectory: what a trainer's batch has room for, apart from the server's context."""

from __future__ import annotations

from strands.types.exceptions import MaxTokensReachedException

from tito_core.backend.typed_values import at_least


class TotalTokensReachedError(MaxTokensReachedException):
    """`max_total_tokens` leaves no token to sample. Nothing was sent, and the ledger is as before.

    Strands lets it out as it is, like the `MaxTokensReachedException` that ends a turn which the bound has cut short.
    It is no context overflow: a conversation manager that shortened the history would begin another trajectory.
    """


def left_of(max_total_tokens: int | None, prompt_length: int, wanted: int, *, at_least: bool = False) -> int:
    """Give the tokens that may be sampled: at most `wanted`, at most what the bound leaves beside the prompt.

    With `at_least` the prompt may have more tokens than `prompt_length`.

    Raises:
        TotalTokensReachedError: It leaves none.
    """
    if max_total_tokens is None:
        return wanted
    if prompt_length >= max_total_tokens:
        has = f"at least {prompt_length}" if at_least else prompt_length
        raise TotalTokensReachedError(
            f"The trajectory has {has} tokens with what came since its last answer, and "
            f"max_total_tokens={max_total_tokens}, which leaves none to sample: end the rollout, or raise the bound."
        )
    return min(wanted, max_total_tokens - prompt_length)


def checked(max_total_tokens: int | None) -> int | None:
    """Check the bound that a user wrote.

    Raises:
        InvalidValueError: It is no number of tokens.
    """
    if max_total_tokens is None:
        return None
    return at_least("max_total_tokens", max_total_tokens, 1, "a number of tokens, at least 1, or None")
