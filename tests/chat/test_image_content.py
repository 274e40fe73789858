"""Which bytes are sent for a picture: its own, or a PNG that is upright, opaque and RGB."""

from __future__ import annotations

import gc
import hashlib
import io
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as pillow

from support.vision import image, png
from tito_core.chat.images import MAX_ASPECT, MAX_PIXELS, ImageError, known_image, read_image
from tito_core.chat.messages import UnsupportedContentError

PIXELS = np.random.default_rng(5).integers(0, 256, (6, 9, 4), np.uint8)


def content(data: bytes, kind: str = "png") -> Any:
    return image(data, kind)["image"]


def encoded(picture: Any, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def pixels(data: bytes) -> Any:
    with pillow.open(io.BytesIO(data)) as picture:
        assert picture.mode == "RGB"
        return np.asarray(picture)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_upright_opaque_rgb_travels_unchanged(kind: str) -> None:
    data = encoded(pillow.fromarray(PIXELS[..., :3]), kind)
    sent = read_image(content(data, "gif"))
    assert sent.data is data
    assert (sent.format, sent.width, sent.height) == (kind, 9, 6)
    assert sent.sha256 == hashlib.sha256(data).digest()


def test_bytes_of_a_subclass_become_plain_bytes() -> None:
    """Readers of equal bytes share the image, so a subclass would reach them too."""
    data = encoded(pillow.fromarray(PIXELS[..., :3] ^ 1), "png")
    sent = read_image(content(np.bytes_(data)))
    assert read_image(content(data)) is sent
    assert (type(sent.data), sent.data) == (bytes, data)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_rotated_jpeg_is_sent_upright(orientation: int) -> None:
    flat = np.full((16, 32, 3), 40, np.uint8)
    flat[:8, :16] = 220  # one bright quarter
    exif = pillow.Exif()
    exif[0x0112] = orientation
    data = encoded(pillow.fromarray(flat), "jpeg", exif=exif, quality=95)
    across, down, diagonal = flat[:, ::-1], flat[::-1], flat.swapaxes(0, 1)
    turns = {2: across, 3: across[::-1], 4: down, 5: diagonal, 6: np.rot90(flat, -1), 8: np.rot90(flat)}
    expected = turns.get(orientation, across[::-1].swapaxes(0, 1))  # 7: mirrored along the other diagonal
    sent = read_image(content(data))
    assert sent.format == "png"
    assert np.abs(pixels(sent.data).astype(int) - expected.astype(int)).max() < 12


@given(st.integers(0, 255), st.integers(0, 255))
def test_transparency_is_laid_on_white(level: int, alpha: int) -> None:
    data = encoded(pillow.fromarray(np.array([[[level, level, level, alpha]] * 2], np.uint8)), "png")
    sent = read_image(content(data))
    expected = (level * alpha + 255 * (255 - alpha)) / 255
    assert np.abs(pixels(sent.data).astype(float) - expected).max() <= 1


@pytest.mark.parametrize("mode", ["L", "P", "1", "LA", "RGBA", "CMYK", "I;16"])
def test_other_modes_become_the_same_colours(mode: str) -> None:
    grey = PIXELS[..., 0]
    if mode == "I;16":
        picture: Any = pillow.fromarray(grey.astype(np.uint16) * 257)
    else:
        picture = pillow.fromarray(PIXELS[..., :3]).convert(mode)
    data = encoded(picture, "jpeg" if mode == "CMYK" else "png")
    sent = read_image(content(data))
    with pillow.open(io.BytesIO(data)) as opened:
        expected = np.stack([grey] * 3, -1) if mode == "I;16" else np.asarray(opened.convert("RGB"))
    assert np.array_equal(pixels(sent.data), expected)
    assert sent.format == "png"


def test_a_palette_with_a_clear_colour_is_opaque() -> None:
    picture = pillow.fromarray(np.array([[0, 1]], np.uint8), "P")
    picture.putpalette([255, 0, 0, 0, 0, 255])
    data = encoded(picture, "png", transparency=0)
    assert pixels(read_image(content(data)).data).tolist() == [[[255, 255, 255], [0, 0, 255]]]


def keyed(samples: Any, bits: int, clear: Sequence[int]) -> bytes:
    """Return a PNG of one row, grey or RGB by the length of `clear`, its transparent colour."""
    flat = "".join(f"{int(value):0{bits}b}" for value in np.ravel(samples))
    row = int(flat + "0" * (-len(flat) % 8), 2).to_bytes(-(-len(flat) // 8), "big")
    header = struct.pack(">IIBBBBB", len(samples), 1, bits, 2 if len(clear) == 3 else 0, 0, 0, 0)
    parts = (b"IHDR", header), (b"tRNS", struct.pack(f">{len(clear)}H", *clear)), (b"IDAT", zlib.compress(b"\0" + row))
    chunks = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in (*parts, (b"IEND", b""))
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@given(st.data())
def test_a_transparent_grey_is_white_and_no_other(bits: int, data: st.DataObject) -> None:
    """A colour has as many bits as the samples; PNG says that its higher bits do not count."""
    most = 2**bits - 1
    samples = data.draw(st.lists(st.integers(0, most), min_size=1, max_size=20))
    near = st.sampled_from(samples).map(lambda value: max(0, value - 1))
    clear = data.draw(st.sampled_from(samples) | near | st.integers(0, 65535 if bits > 1 else 1))
    sent = read_image(content(keyed(samples, bits, [clear])))
    expected = [255 if value == clear & most else value * 255 // most for value in samples]
    assert pixels(sent.data).tolist() == [[[value] * 3 for value in expected]]


def test_a_transparent_colour_of_rgb_is_white_and_no_other() -> None:
    sent = read_image(content(keyed([(1, 2, 3), (1, 2, 4)], 8, [1, 2, 3])))
    assert pixels(sent.data).tolist() == [[[255, 255, 255], [1, 2, 4]]]


@pytest.mark.parametrize("clear", [(257, 514, 771), (1, 2, 3)])
def test_a_transparent_colour_that_cannot_be_compared_is_refused(clear: tuple[int, int, int]) -> None:
    """Pillow keeps the high byte of each sample, so it makes these two pixels transparent for both colours."""
    with pytest.raises(ImageError, match=r"16 bits a channel .*transparent colour \(\d+, .* Convert .* to RGBA"):
        read_image(content(keyed([(257, 514, 771), (258, 514, 771)], 16, clear)))


def test_a_picture_is_decoded_once_while_it_is_held() -> None:
    data = png(3, 3, 9, kind=6)
    sent = read_image(content(data))
    assert read_image(content(bytes(bytearray(data)))) is sent
    assert known_image(content(data)) is sent
    del sent
    gc.collect()
    assert known_image(content(data)) is None


WHOLE, DOT = png(9, 6, 1), pillow.new("RGB", (2, 2))
BAD: list[tuple[bytes, str, str]] = [
    (b"", "png", "0 bytes are not a picture"),
    (b"\x89PNG\r\n\x1a\n", "png", "8 bytes are not|broken"),
    (WHOLE[:60], "png", "broken picture"),
    (WHOLE[:80] + b"\xff" + WHOLE[81:], "png", "broken picture"),
    (encoded(DOT, "bmp"), "png", "not a picture of a supported format"),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "png", "not a picture"),
    (WHOLE, "tiff", "'tiff' is not supported.*png"),
    (png(1, MAX_ASPECT + 1, 1), "png", f"1 x {MAX_ASPECT + 1}.*ratio above {MAX_ASPECT}"),
    (encoded(DOT, "gif", save_all=True, append_images=[DOT.convert("L").point(lambda _: 9)]), "gif", "2 frames"),
]


@pytest.mark.parametrize(("data", "kind", "words"), BAD)
def test_a_bad_picture_is_refused(data: bytes, kind: str, words: str) -> None:
    with pytest.raises(ImageError, match=words) as caught:
        read_image(content(data, kind))
    assert isinstance(caught.value, UnsupportedContentError)


@given(st.data())
def test_damaged_bytes_are_a_picture_or_refused(data: st.DataObject) -> None:
    """Whatever was damaged: the result can be decoded again, or the error is ours."""
    kind = data.draw(st.sampled_from(["png", "jpeg", "gif", "webp"]))
    damaged = bytearray(encoded(pillow.fromarray(PIXELS[..., :3]), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(len(damaged) // 2, len(damaged))) :]
    try:
        sent = read_image(content(bytes(damaged)))
    except ImageError:
        return
    assert pixels(sent.data).shape == (sent.height, sent.width, 3)


@pytest.mark.parametrize("side", [9_000, 20_000])
def test_a_bomb_is_refused_before_it_is_decoded(side: int) -> None:
    """A file of some kilobytes whose header says more pixels than are ever decoded."""
    small = png(1, 1, 1)
    header = small[:16] + side.to_bytes(4, "big") * 2 + small[24:]
    header = header[:29] + struct.pack(">I", zlib.crc32(header[12:29])) + header[33:]
    tracemalloc.start()
    with pytest.raises(ImageError, match=f"{MAX_PIXELS:,} pixels"):
        read_image(content(header))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImageError, match=r"'\.\[images\]'"):
        read_image(content(png(2, 2, 77)))
