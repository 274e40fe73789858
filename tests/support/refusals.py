"""Check that a law refuses something, without repeating the error's sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tito_core.ledger import LawViolationError


@contextmanager
def breaks_law(law: int, *values: object) -> Iterator[None]:
    """Expect a `LawViolationError` of a law whose message has every value."""
    with pytest.raises(LawViolationError) as caught:
        yield
    assert caught.value.law == law
    message = str(caught.value)
    assert message.startswith(f"Law {law}: ")
    assert [value for value in map(str, values) if value not in message] == [], message
