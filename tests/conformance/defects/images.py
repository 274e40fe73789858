"""Defects of images: pictures that are exchanged, dropped, expanded or counted wrongly, stale, or another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from conformance.defects.defect import Defect
from tito_conformance.testing import (
    EngineState,
    ImageSettings,
    PlacedImage,
    pictures,
    sglang_requests,
    vllm_requests,
)
from tito_conformance.testing.pictures import picture
from tito_core.ledger import Image
from tito_core.turn import request
from tito_sglang import wire as sglang_client
from tito_vllm import wire as vllm_client

BOTH = ("vllm", "sglang")
Placed = tuple[tuple[int, ...], tuple[PlacedImage, ...]]
Place = Callable[[Sequence[int], Sequence[bytes], ImageSettings], Placed]
_ORIGINAL: Place = pictures.place


def _placing(change: Place) -> Callable[[], AbstractContextManager[Any]]:
    """Change how the scripted servers place pictures."""

    def patched() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for module in (vllm_requests, sglang_requests):
            stack.enter_context(mock.patch.object(module, "place", change))
        return stack

    return patched


def _swapped(ids: Sequence[int], pictures: Sequence[bytes], settings: ImageSettings) -> Placed:
    expanded, placed = _ORIGINAL(ids, pictures, settings)
    digests = [each.digest for each in placed][::-1]
    return expanded, tuple(each._replace(digest=other) for each, other in zip(placed, digests, strict=True))


def _dropped(ids: Sequence[int], pictures: Sequence[bytes], settings: ImageSettings) -> Placed:
    return _ORIGINAL(ids, pictures[:-1] if len(pictures) > 1 else pictures, settings)


def _all_dropped(ids: Sequence[int], pictures: Sequence[bytes], settings: ImageSettings) -> Placed:
    return tuple(ids), ()


def _not_seen(ids: Sequence[int], pictures: Sequence[bytes], settings: ImageSettings) -> Placed:
    """Expand the last picture, and read it as nothing."""
    expanded, placed = _ORIGINAL(ids, pictures, settings)
    if len(placed) > 1:
        placed = (*placed[:-1], placed[-1]._replace(digest=bytes(32)))
    return expanded, placed


def _always_the_same(ids: Sequence[int], pictures: Sequence[bytes], settings: ImageSettings) -> Placed:
    return _ORIGINAL(ids, [picture(0) for _ in pictures], settings)


@contextmanager
def _served_by_size() -> Iterator[None]:
    """Serve the picture that was seen first with this number of tokens, as a cache with a poor key does."""
    known: dict[int, bytes] = {}

    def place(ids: Sequence[int], pictures: Sequence[bytes], settings: ImageSettings) -> Placed:
        return _ORIGINAL(ids, [known.setdefault(settings.tokens(each), each) for each in pictures], settings)

    with _placing(place)():
        yield


@contextmanager
def _of_the_request_before() -> Iterator[None]:
    """Read the pictures of the request before, if it had as many."""
    before: list[Sequence[bytes]] = [()]

    def place(ids: Sequence[int], pictures: Sequence[bytes], settings: ImageSettings) -> Placed:
        used = before[0] if len(before[0]) == len(pictures) else pictures
        before[0] = pictures
        return _ORIGINAL(ids, used, settings)

    with _placing(place)():
        yield


@contextmanager
def _stale() -> Iterator[None]:
    """Keep the features of pictures that older weights have read."""
    read: dict[bytes, str] = {}
    versions = ["default"]
    set_version = EngineState.set_version

    def update(self: EngineState, version: str) -> None:
        versions[0] = version
        set_version(self, version)

    def place(ids: Sequence[int], pictures: Sequence[bytes], settings: ImageSettings) -> Placed:
        expanded, placed = _ORIGINAL(ids, pictures, settings)
        old = [read.setdefault(data, versions[0]) != versions[0] for data in pictures]
        return expanded, tuple(
            each._replace(digest=each.digest[::-1]) if is_old else each
            for each, is_old in zip(placed, old, strict=False)
        )

    with _placing(place)(), mock.patch.object(EngineState, "set_version", update):
        yield


Sent = Callable[[Sequence[Image]], Sequence[Image]]


def _sending(change: Sent) -> Callable[[], AbstractContextManager[Any]]:
    """Change the pictures that the client sends."""

    def patched() -> AbstractContextManager[Any]:
        stack = ExitStack()
        for module, name in ((vllm_client, "image_parts"), (sglang_client, "image_fields")):
            original = getattr(module, name)
            stack.enter_context(mock.patch.object(module, name, partial(_changed, original, change)))
        return stack

    return patched


def _changed(original: Callable[[Sequence[Image]], Any], change: Sent, images: Sequence[Image]) -> Any:
    return original(change(images))


def _backwards(images: Sequence[Image]) -> Sequence[Image]:
    return images[::-1]


def _all_lost() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(vllm_client, "image_parts", return_value=[]))
    stack.enter_context(mock.patch.object(sglang_client, "image_fields", return_value={}))
    return stack


def _another(images: Sequence[Image]) -> Sequence[Image]:
    """Send another picture of the same size in place of the first."""
    first = images[0]
    other = Image(picture(999, first.width, first.height), "png", first.width, first.height)
    return [other, *images[1:]]


@contextmanager
def _another_by_name() -> Iterator[None]:
    """Send another picture of the same size under the name of the right one."""
    parts, fields = vllm_client.image_parts, sglang_client.image_fields

    def named_parts(images: Sequence[Image]) -> Any:
        return [
            {**sent, "uuid": part["uuid"]} for sent, part in zip(parts(_another(images)), parts(images), strict=True)
        ]

    def unnamed_fields(images: Sequence[Image]) -> Any:
        return {"image_data": fields(_another(images))["image_data"]}

    with (
        mock.patch.object(vllm_client, "image_parts", named_parts),
        mock.patch.object(sglang_client, "image_fields", unnamed_fields),
    ):
        yield


def _as_listed_last(original: Any) -> Any:
    """Number the pictures of messages from the last one."""
    return lambda *arguments, **options: original(*arguments, **options)[::-1]


IMAGES = (
    Defect("image-order-swapped", 4, "The server reads pictures in the reverse order.",
           client=_placing(_swapped), wires=BOTH, images=True),
    Defect("image-dropped", 4, "The server leaves the last of several pictures out.",
           client=_placing(_dropped), wires=BOTH, images=True),
    Defect("images-all-dropped", 4, "The server leaves every picture out, also a sole one.",
           client=_placing(_all_dropped), wires=BOTH, images=True),
    Defect("image-not-seen", 4, "The server expands the last of several pictures, and does not look at it.",
           client=_placing(_not_seen), wires=BOTH, images=True),
    Defect("image-always-the-same", 4, "The server reads one picture in place of all.",
           client=_placing(_always_the_same), wires=BOTH, images=True),
    Defect("image-cached-by-size", 4, "The server serves the first picture of this size from a cache.",
           client=_served_by_size, wires=BOTH, images=True),
    Defect("image-of-the-request-before", 4, "The server reads the pictures of the request before.",
           client=_of_the_request_before, wires=BOTH, images=True),
    Defect("image-stale", 10, "After a weight update, pictures that were seen before have old features.",
           client=_stale, wires=BOTH, images=True, weights=1),
    Defect("client-images-backwards", 4, "The client sends pictures in the reverse order.",
           client=_sending(_backwards), wires=BOTH, images=True),
    Defect("images-lost-on-the-way", 4, "The client, or a proxy, removes the field with all pictures.",
           client=_all_lost, wires=BOTH, images=True),
    Defect("client-image-another", 4, "The client sends another picture of the same size.",
           client=_sending(_another), wires=BOTH, images=True),
    Defect("client-image-another-by-name", 4, "The client sends another picture under the right one's name.",
           client=_another_by_name, wires=BOTH, images=True),
    Defect("client-image-order", 7, "The ledger holds the pictures of a message in the reverse order.",
           client=lambda: mock.patch.object(request, "image_blocks", _as_listed_last(request.image_blocks)),
           wires=BOTH, images=True),
)  # fmt: skip
"""Defects of images, in servers and in the client."""
