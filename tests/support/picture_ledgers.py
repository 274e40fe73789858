"""Ledgers with images, without an engine: readable ids, 150 for placeholders and 200s for answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from support.drafts import engine_record, make_draft
from tito_conformance.testing.pictures import picture
from tito_core.ledger import Columns, Image, Ledger, MediaSpan, Provenance

PAD = 150


def seen(*turns: tuple[list[int], list[tuple[int, int]], int], stray: int | None = None) -> Ledger:
    """Return a ledger of one path: for each turn its prompt ids, (offset in these, length) of its images, and the
    number of output tokens. Pictures are numbered through. The last sampled token of turn `stray` is a placeholder,
    which the header names."""
    ledger, count = Ledger(certificate={"media_ids": [PAD]}), 0
    for number, (ids, spans, output) in enumerate(turns):
        before = ledger.path_length(number - 1 if number else None)
        images = [Image(picture(count + n), "png", 64, 64) for n in range(len(spans))]
        count += len(spans)
        media = tuple(
            MediaSpan(before + offset, length, image.sha256, "png", 64, 64)
            for (offset, length), image in zip(spans, images, strict=True)
        )
        answer = np.arange(200, 200 + output, dtype=np.int32)
        answer[-1:] = PAD if number == stray else answer[-1:]
        columns = Columns.pack(
            np.array(ids, np.int32),
            np.full(len(ids), Provenance.PROMPT, np.uint8),
            answer,
            -np.ones(output, np.float32),
        )
        draft = make_draft(number - 1 if number else None, before, ids, [1] * output, media=media)
        record = engine_record(output)
        ledger.commit(replace(draft, columns=columns, engine=record, stop=None), images=images)
    return ledger


def two_images(stray: int | None = None) -> Ledger:
    """Return a ledger of two turns with an image each: of four placeholders in the prompt, of two in the response."""
    return seen(([1, PAD, PAD, PAD, PAD, 2], [(1, 4)], 2), ([3, PAD, PAD, 4], [(1, 2)], 3), stray=stray)


class Patches:
    """An image processor for `two_images`: by its number of calls, 2 x 8 and 2 x 4 patches, four of them a token."""

    merge_size = 2

    def __init__(self) -> None:
        self.columns = [8, 4]

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        grid = np.array([[1, 2, self.columns.pop(0)] for _ in images])
        patches = int(grid.prod(axis=1).sum())
        return {"pixel_values": np.arange(patches * 3.0).reshape(patches, 3), "image_grid_thw": grid}
