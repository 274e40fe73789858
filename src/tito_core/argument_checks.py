"""What a model and a turn are given besides settings and messages, checked where a user gives it."""

from __future__ import annotations

from typing import Any

from tito_core.backend.typed_values import InvalidValueError
from tito_core.ledger.ledger import Ledger


def check_parts(policy: Any, ledger: Any, of: type) -> None:
    """Check what a model is made of; `of` is the class of policies.

    Raises:
        InvalidValueError: The policy or the ledger is something else.
    """
    if not isinstance(policy, of):
        raise InvalidValueError(f"policy must be what Policy.connect returns, not of type {type(policy).__name__}.")
    if ledger is not None and not isinstance(ledger, Ledger):
        raise InvalidValueError(f"ledger must be a Ledger, or None for a new one, not of type {type(ledger).__name__}.")


def check_channels(model_state: Any, cancel_signal: Any) -> None:
    """Check by what an agent and a turn know of each other.

    Raises:
        InvalidValueError: The state is not a dict, or the signal is not an event.
    """
    if model_state is not None and not isinstance(model_state, dict):
        raise InvalidValueError(f"model_state must be a dict, or None, not of type {type(model_state).__name__}.")
    if cancel_signal is not None and not hasattr(cancel_signal, "is_set"):
        raise InvalidValueError(
            f"cancel_signal must be a threading.Event, or None, not of type {type(cancel_signal).__name__}."
        )
