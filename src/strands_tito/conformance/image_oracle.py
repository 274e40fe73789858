"""The oracle of images: placeholders, pictures and spans of a turn, compared with the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

from strands_tito.conformance.oracle_turn import OracleImage, Problem
from strands_tito.conformance.wire_reading import WireGeneration


def collapsed(ids: Sequence[int], images: Sequence[OracleImage]) -> list[int]:
    """Return a path with each image's placeholders replaced by the first one, as a prompt is sent."""
    inside = {at for image in images for at in range(image.offset + 1, image.offset + image.length)}
    return [token for at, token in enumerate(ids) if at not in inside]


def compare_images(ids: Sequence[int], images: Sequence[OracleImage], answer: WireGeneration) -> Iterator[Problem]:
    """Compare the images of a path with those of the request and with the server's own report.

    Args:
        ids: The path, up to the end of the turn's prompt, expanded.
        images: The images of the path, in order.
        answer: The turn's generation.
    """
    sent = [None if data is None else sha256(data).hexdigest() for data in answer.images]
    digests = [image.sha256 for image in images]
    if len(sent) != len(digests):
        yield "images", f"{len(sent)} pictures were sent, the path has {len(digests)}."
    for place, (found, name, digest) in enumerate(zip(sent, answer.image_names, digests, strict=False)):
        if found is not None and found != digest:
            yield "images", f"picture {place} has the digest {found[:12]}, the ledger has {digest[:12]}."
        if (found is None or name is not None) and not str(name).endswith(digest):
            yield "images", f"picture {place} was sent under the name {name!r}, its digest is {digest[:12]}."
    spans = [(image.offset, image.length) for image in images]
    if answer.image_spans is not None and answer.image_spans != spans:
        yield "images", f"the server reports the placeholders {answer.image_spans}, the ledger has {spans}."
    if answer.image_tokens is not None and answer.image_tokens != sum(length for _, length in spans):
        yield "images", f"the server counted {answer.image_tokens} image tokens, the ledger has {spans}."
    if not images:
        return
    if answer.image_spans is None and answer.image_tokens is None:
        yield "images", "the server reports nothing about the pictures."
    inside = {at for image in images for at in range(image.offset, image.offset + image.length)}
    held = {ids[at] if at < len(ids) else None for at in inside}
    if len(held) != 1 or not all(image.length > 0 for image in images):
        yield "images", f"the spans {spans} of pictures hold the tokens {sorted(map(str, held))}, not one placeholder."
    outside = [at for at, token in enumerate(ids) if token in held and at not in inside]
    if outside:
        yield "images", f"token {outside[0]} is a placeholder, but belongs to no picture."
