"""Semantics of logprobs, and what a path has."""

from __future__ import annotations

import pytest

from support.picture_ledgers import two_images
from tito_core.ledger import Semantics


@pytest.mark.parametrize(
    ("temperature", "adjusted", "comparable"),
    [(1.0, False, True), (1.0, True, False), (0.5, False, False), (0.5, True, False), (None, False, False)],
)
def test_scoring_compares_only_raw_logprobs_at_temperature_one(
    temperature: float | None, adjusted: bool, comparable: bool
) -> None:
    assert Semantics(None, temperature, adjusted, "test").comparable_with_scoring() is comparable


def test_a_path_has_the_media_and_images_of_its_turns() -> None:
    ledger = two_images()
    assert [[(span.offset, span.length) for span in ledger.media(index)] for index in (None, 0, 1)] == [
        [],
        [(1, 4)],
        [(1, 4), (9, 2)],
    ]
    (trajectory,) = ledger.iter_trajectories()
    assert [image.sha256 for image in trajectory.images] == [span.sha256 for span in ledger.media(1)]
    assert len({image.data for image in trajectory.images}) == 2
