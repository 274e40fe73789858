"""Images in a file of ledgers: once each, before the turn that shows them, also after a crash."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.drafts import make_draft
from support.picture_ledgers import two_images
from tito_core import store
from tito_core.ledger import Image, LawViolationError, Ledger, MediaSpan, check_ledger
from tito_core.store import LedgerFile, SchemaError

ONE, TWO = Image(b"one" * 99, "png", 3, 4), Image(b"two" * 99, "jpeg", 5, 6)


def shown(start: int, *images: Image) -> tuple[MediaSpan, ...]:
    spans = [(start + at, image) for at, image in enumerate(images)]
    return tuple(MediaSpan(at, 1, image.sha256, image.format, image.width, image.height) for at, image in spans)


def first() -> Any:
    return make_draft(None, 0, [7, 7], [1], media=shown(0, ONE, ONE))


def second() -> Any:
    return make_draft(0, 3, [7, 7], [2], media=shown(3, TWO, ONE))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_crash_at_any_byte_loses_the_last_turn_at_most(tmp_path: Path, data: st.DataObject) -> None:
    """The process that continues writes again what was cut off, and nothing twice."""
    path = tmp_path / "a.tito"
    path.unlink(missing_ok=True)
    with LedgerFile(path, "a") as file:
        ledger = file.attach(Ledger())
        ledger.commit(first(), images=[ONE])
        before = path.stat().st_size
        ledger.commit(second(), images=[ONE, TWO])
    whole = path.read_bytes()
    assert whole.count(ONE.data) == whole.count(TWO.data) == 1
    path.write_bytes(whole[: data.draw(st.integers(before, len(whole) - 1))])
    [left] = store.read(path)
    assert (len(left), ONE.sha256 in left.images) == (1, True)
    again: Ledger
    with LedgerFile(path, "a") as file:
        if data.draw(st.booleans()):
            again = file.resume(ledger.uuid)
            again.commit(second(), images=[ONE, TWO])
        else:  # another process still holds the whole ledger
            file.append(ledger)
    [loaded] = store.read(path)
    assert set(loaded.images) == {ONE.sha256, TWO.sha256}
    assert len(loaded) == 2
    assert path.read_bytes().count(TWO.data) == 1


def test_a_turn_without_its_images_is_refused(tmp_path: Path) -> None:
    ledger = Ledger()
    with pytest.raises(LawViolationError, match="no image with that digest"):
        ledger.commit(first())
    assert (len(ledger), len(ledger.images)) == (0, 0)
    ledger.commit(first(), images=[ONE])
    with pytest.raises(LawViolationError, match=r"digest.* Give it the images") as caught:
        Ledger.load(ledger.header, [turn.draft for turn in ledger], ())
    assert caught.value.law == 4
    check_ledger(Ledger.load(ledger.header, [turn.draft for turn in ledger], (), [ONE]))


def test_an_image_that_a_crash_left_does_not_stand_for_another(tmp_path: Path) -> None:
    """The turn is sampled again with another picture; `append` writes that one, although the file holds as many."""
    path = tmp_path / "a.tito"
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [7, 7], [1]))
    again = deepcopy(ledger)
    ledger.commit(make_draft(0, 3, [7], [2], media=shown(3, ONE)), images=[ONE])
    again.commit(make_draft(0, 3, [7], [2], media=shown(3, TWO)), images=[TWO])
    with LedgerFile(path, "a") as file:
        file.append(ledger)
    path.write_bytes(path.read_bytes()[:-1])  # the last turn is torn, its image whole
    with LedgerFile(path, "a") as file:
        file.append(again)
    [loaded] = store.read(path)
    assert (len(loaded), set(loaded.images)) == (2, {ONE.sha256, TWO.sha256})


@pytest.mark.parametrize("kind", [np.bytes_, type("Other", (bytes,), {"__bytes__": lambda self: self})])
def test_bytes_of_a_subclass_are_stored_as_bytes(tmp_path: Path, kind: Any) -> None:
    ledger = Ledger()
    ledger.commit(first(), images=[Image(kind(ONE.data), "png", 3, 4)])
    with LedgerFile(tmp_path / "a.tito", "a") as file:
        file.append(ledger)
    for loaded in (*store.read(tmp_path / "a.tito"), store.from_json(store.to_json(ledger))):
        assert [(type(image.data), image.data) for image in loaded.images.values()] == [(bytes, ONE.data)]


def edit_size(ledger: Any) -> None:
    ledger["images"][0].update(width=32, height=32)
    ledger["turns"][0]["media"][0][4:] = [32, 32]


def edit_kind(ledger: Any) -> None:
    ledger["images"][0]["format"] = ledger["turns"][0]["media"][0][3] = "jpeg"


def edit_bytes(ledger: Any) -> None:
    ledger["images"][0]["data"] = ledger["images"][1]["data"]


def edit_span(offset: int, length: int, *, known: bool = True) -> Callable[[Any], None]:
    """Return an edit of the span of the first turn, whose placeholders are 1 to 4; `known` keeps its format."""

    def edit(ledger: Any) -> None:
        ledger["turns"][0]["media"][0][:2] = [offset, length]
        del ledger["turns"][0]["media"][0][6 if known else 3 :]

    return edit


def delete_span(ledger: Any) -> None:
    del ledger["turns"][0]["media"]


EDITS: list[tuple[Callable[[Any], None], str]] = [
    (edit_size, "a PNG of 64 x 64 pixels.* described as png of 32 x 32"),
    (edit_kind, "a PNG of 64 x 64 pixels.* described as jpeg of 64 x 64"),
    (edit_bytes, "no image with that digest"),
    (edit_span(1, 3), "turn 0: token 4 has id 150 and no media span holds it"),
    (edit_span(5, 1), "turn 0: token 1 has id 150 and no media span holds it"),
    (edit_span(1, 5, known=False), r"turn 0: token 5 has id 2 and a media span holds it.* ids \[150\]"),
    (delete_span, "turn 0: token 1 has id 150 and no media span holds it"),
]


@pytest.mark.parametrize(("edit", "words"), EDITS)
def test_edited_media_are_refused(edit: Callable[[Any], None], words: str) -> None:
    record = store.to_json(two_images())
    record["header"]["certificate"]["content_tokens"] = "inert"
    store.from_json(deepcopy(record))
    edit(record)
    with pytest.raises((SchemaError, LawViolationError), match=words):
        store.from_json(record)


def test_a_text_may_spell_a_placeholder_where_the_certificate_allows_it() -> None:
    ledger = Ledger(certificate={"media_ids": [7], "content_tokens": "as-template"})
    ledger.commit(make_draft(None, 0, [1, 7], [2]))
    check_ledger(ledger)
