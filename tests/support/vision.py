"""A toy engine that takes images, its template, and pictures made by hand. It shares no code with the client."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from support.byte_level import CHATML_TOOLS, SPECIAL, byte_level
from tito_core.backend.images import ImageSupport
from tito_core.backend.protocol import EngineInfo, RawResponse, RawScores, TokenChunk
from tito_core.model import Policy
from tito_core.policy import bind

PAD_TEXT = "<|image_pad|>"
VISION = ("<|vision_start|>", PAD_TEXT, "<|vision_end|>")
VIDEO_TEXT = "<|video_pad|>"
_SHOW = """
{%- macro show(content) -%}
    {%- if content is string -%}{{- content -}}{%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- else -%}{{- part.text -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
"""
TEMPLATE = _SHOW + CHATML_TOOLS.replace("message.content +", "show(message.content) +").replace(
    "header(message.role) + message.content", "header(message.role) + show(message.content)"
)
LIMIT = 8


@cache
def tokenizer(template: str = TEMPLATE) -> Any:
    return byte_level(special=(*SPECIAL, *VISION, VIDEO_TEXT), template=template)


def png(width: int, height: int, seed: int, kind: int = 2) -> bytes:
    """A PNG of 8-bit samples: of colour type 0 (grey), 2 (RGB) or 6 (RGBA)."""
    size = {0: 1, 2: 3, 6: 4}[kind] * width
    rows = b"".join(b"\0" + hashlib.shake_128(bytes([seed % 256, y % 256])).digest(size) for y in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    )


def image(data: bytes, kind: str = "png") -> Any:
    return {"image": {"format": kind, "source": {"bytes": data}}}


@dataclass
class VisionEngine:
    """An engine whose tokens and logprobs depend on every id and every image before them.

    Attributes:
        answers: Texts of the next answers; without one, a few letters are drawn.
        spans: Whether it reports each image's span.
        counts: Whether it reports the number of image tokens.
        change: Changes the fields of a response.
        read: The expanded prompt of each request, and the digests of its images.
    """

    answers: list[str] = field(default_factory=list)
    spans: bool = True
    counts: bool = True
    support: ImageSupport = ImageSupport(True, LIMIT)  # noqa: RUF009  # frozen
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict
    read: list[tuple[list[int], list[bytes]]] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    context: int = 100_000
    name = "toy"

    def __post_init__(self) -> None:
        self.tokenizer = tokenizer()
        self.pad = self.tokenizer.convert_tokens_to_ids(PAD_TEXT)
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")

    async def connect(self) -> EngineInfo:
        rows = len(self.tokenizer)
        return EngineInfo("toy", "m", self.context, "1", vocab_size=rows, images=self.support)

    async def generate(self, request: Any, on_chunk: Any = None) -> RawResponse:
        self.requests.append(request)
        images = list(request.images.images) if request.images is not None else []
        sent = request.input_ids.tolist()
        assert not images or sent.count(self.pad) == len(images), "a real server would answer this, with other tokens"
        ids, spans = self._expanded(sent, [image.data for image in images])
        digests = [hashlib.sha256(image.data).digest() for image in images]
        self.read.append((ids, digests))
        output = self._output(ids, digests, request)
        if on_chunk is not None:
            on_chunk(TokenChunk(output))
        finished = output[-1] in request.sampling.stop_token_ids
        fields = {
            "response_id": request.request_id,
            "finish": "stop" if finished else "length",
            "stop": output[-1] if finished else None,
            "output_ids": output,
            "logprobs": self._logprobs([*ids, *output], spans, digests)[len(ids) :],
            "echoed": list(ids) if request.echo else None,
            "prompt_tokens": len(ids),
            "completion_tokens": len(output),
            "media": spans if self.spans and images else None,
            "image_tokens": sum(length for _, length in spans) if self.counts and images else None,
        }
        return RawResponse(**self.change(fields))

    async def score(self, token_ids: Any) -> RawScores:
        return await self.score_with_images(token_ids, None)

    async def score_with_images(self, token_ids: Any, images: Any) -> RawScores:
        shown = [] if images is None else images.images
        ids, spans = self._expanded(token_ids.tolist(), [image.data for image in shown])
        digests = [hashlib.sha256(image.data).digest() for image in shown]
        logprobs: list[float | None] = [*self._logprobs(ids, spans, digests)]
        logprobs[0] = None
        return RawScores(logprobs=logprobs, token_ids=ids)

    def _expanded(self, ids: list[int], images: Sequence[bytes]) -> tuple[list[int], list[tuple[int, int]]]:
        read: list[int] = []
        spans = []
        left = iter(images)
        for token in ids:
            data = next(left, None) if token == self.pad else None
            length = 1 if data is None else tokens_of(data)
            if data is not None:
                spans.append((len(read), length))
            read += [token] * length
        return read, spans

    def _output(self, ids: list[int], digests: list[bytes], request: Any) -> list[int]:
        if self.answers:
            text = self.answers.pop(0)
            return [*self.tokenizer.encode(text, add_special_tokens=False)][: request.sampling.max_new_tokens]
        state = hashlib.blake2b(repr((ids, digests)).encode()).digest()
        letters = self.tokenizer.encode("".join(chr(97 + byte % 26) for byte in state[: 1 + state[0] % 6]))
        return [*letters, self.end][: request.sampling.max_new_tokens]

    def _logprobs(self, ids: list[int], spans: Any, digests: list[bytes]) -> list[float]:
        starts = dict(zip((start for start, _ in spans), digests, strict=True))
        state, found = b"", []
        for at, token in enumerate(ids):
            state = hashlib.blake2b(state + starts.get(at, b"") + token.to_bytes(4, "little"), digest_size=8).digest()
            found.append(-int.from_bytes(state[:2], "little") / 16384 - 0.001)
        return found

    async def tokenize(self, text: str) -> None:
        return None

    async def abort(self, request_id: str) -> None: ...

    async def aclose(self) -> None: ...


def tokens_of(data: bytes) -> int:
    """Return the number of tokens of an image, from the size in its PNG header."""
    width, height = struct.unpack(">II", data[16:24])
    return 1 + (width * height) // 16


@cache
def bound(template: str) -> Any:
    return bind(tokenizer(template))


async def policy_of(engine: VisionEngine, template: str = TEMPLATE, **options: Any) -> Policy:
    return Policy(engine, await engine.connect(), *bound(template), **options)
