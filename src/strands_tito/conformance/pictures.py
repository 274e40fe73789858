"""Which picture a server read, found out from its scores: of fixed prompts with two pictures of one size."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strands_tito.conformance.laws import Tally
from strands_tito.conformance.target import ConnectedServer
from strands_tito.testing.pictures import picture, same_pixels
from tito_core.backend.calls import generate, score
from tito_core.backend.images import PromptImages
from tito_core.backend.protocol import TokenRequest
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.image import Image

SEEDS = (101, 102, 103)
"""Pictures of one size, which no conversation shows."""
SIZE = 64
"""Sides of the pictures, in pixels."""


@dataclass(frozen=True)
class Scored:
    """Scores of a prompt with two pictures.

    Attributes:
        between: Scores of the tokens between the pictures, which depend on the first alone.
        after: Scores of the tokens after both.
    """

    between: Logprobs
    after: Logprobs


def image_of(seed: int, comment: str | None = None) -> Image:
    """Return a picture, or with a comment another file of the same pixels."""
    data = picture(seed, SIZE, SIZE)
    return Image(data if comment is None else same_pixels(data, comment), "png", SIZE, SIZE)


def prompt_of(server: ConnectedServer) -> TokenIds:
    """Return a collapsed prompt with two pictures and texts between and after them."""
    blank = {"image": {"format": "png", "source": {"bytes": b""}}}
    blocks: Any = [
        blank,
        {"text": "This is one of two. The other one follows."},
        blank,
        {"text": "Compare both, please."},
    ]
    return server.policy.template.first_prompt([{"role": "user", "content": blocks}], None, None).ids


async def check_pictures(server: ConnectedServer, tally: Tally) -> None:
    """Check that scores depend on each picture, and on nothing else about it.

    The tokens between two pictures depend on the first alone, so that a server which exchanges them, drops one or
    reads another one is noticed although its echo is right.
    """
    one, other, third = map(image_of, SEEDS)
    prompt = prompt_of(server)
    lengths = await _lengths(server, prompt, (one, other))
    scores = {
        names: await _scores(server, prompt, images, lengths)
        for names, images in {
            "A, B": (one, other),
            "B, A": (other, one),
            "A, C": (one, third),
            "C, B": (third, other),
            "A, B again": (one, other),
            "A, B as other files": (image_of(SEEDS[0], "one"), image_of(SEEDS[1], "other")),
        }.items()
    }
    first, tolerance = scores["A, B"], server.tolerance_nats
    for names, same_between, same_after in (
        ("B, A", False, False),
        ("A, C", True, False),
        ("C, B", False, False),
        ("A, B again", True, True),
        ("A, B as other files", True, True),
    ):
        for place, same in (("between", same_between), ("after", same_after)):
            apart = float(np.max(np.abs(getattr(first, place) - getattr(scores[names], place))))
            problem = (
                f"the scores of the tokens {place} two pictures are {apart:.4g} nats apart for the pictures A, B and "
                f"{names}, but should be {'equal' if same else 'different'}."
            )
            tally.require("looked", (apart <= tolerance) == same, problem)


async def check_after_update(server: ConnectedServer, tally: Tally) -> None:
    """Check that new weights read a picture which older weights have read too.

    The same pixels in files that the server has never seen cannot be in any cache.
    """
    prompt, known = prompt_of(server), (image_of(SEEDS[0]), image_of(SEEDS[1]))
    lengths = await _lengths(server, prompt, known)
    version = str(server.live_version)
    new = tuple(image_of(seed, f"{version} {uuid.uuid4().hex}") for seed in SEEDS[:2])
    old, fresh = [await _scores(server, prompt, images, lengths) for images in (known, (new[0], new[1]))]
    apart = max(float(np.max(np.abs(getattr(old, place) - getattr(fresh, place)))) for place in ("between", "after"))
    problem = (
        f"after the update to {version!r}, tokens behind pictures that the server saw before have other scores than "
        f"behind new files of the same pixels, by up to {apart:.4g} nats."
    )
    tally.require("fresh", apart <= server.tolerance_nats, problem)


async def _lengths(server: ConnectedServer, prompt: TokenIds, images: tuple[Image, ...]) -> tuple[int, ...]:
    """Let the server expand the pictures; return their numbers of tokens."""
    pictures = PromptImages(images, _placeholder(server))
    request = TokenRequest(prompt, SamplingParams(max_new_tokens=1, temperature=0.0), uuid.uuid4().hex, images=pictures)
    response = await generate(server.policy.backend, request)
    return tuple(length for _, length in response.media)


async def _scores(
    server: ConnectedServer, prompt: TokenIds, images: tuple[Image, ...], lengths: Sequence[int]
) -> Scored:
    placeholder = _placeholder(server)
    values = await score(server.policy.backend, prompt, PromptImages(images, placeholder, tuple(lengths)))
    begin, second = np.flatnonzero(prompt == placeholder).tolist()
    middle = slice(begin + lengths[0], second + lengths[0] - 1)
    return Scored(values[middle], values[second + sum(lengths) - 1 :])


def _placeholder(server: ConnectedServer) -> int:
    found = server.policy.template.placeholder_id
    assert found is not None  # the suite asks only servers whose template shows images
    return found
