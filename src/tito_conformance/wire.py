"""Generations as they went over the wire, under field names that all engines' readers share.

The readers of vLLM and SGLang are in `tito_conformance.testing`, another engine's in its package. Each is found through
the entry point group `tito.wires`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class WireExchange:
    """One HTTP request, and as much of its response as arrived.

    Attributes:
        method: Of the request.
        path: Of its URL, without the query.
        headers: Of the request, names in lower case, without the API key.
        sent: The request's body.
        status: The response's status; None if no response arrived.
        got: The response's body, as far as it was read.
        whole: Whether the response arrived completely.
    """

    method: str
    path: str
    headers: dict[str, str]
    sent: bytes
    status: int | None = None
    got: bytearray = field(default_factory=bytearray)
    whole: bool = False


@dataclass
class WireGeneration:
    """One generation as the wire shows it. A field that the engine does not report is None.

    Attributes:
        request_id: The request's id, as the client sent it.
        prompt_ids: The prompt as sent, with one placeholder for each picture.
        sampling: Sampling parameters as sent. The reader names them as `SamplingParams` does; `max_tokens`,
            `min_tokens` and `sampling_seed` are known, too.
        echoed_ids: The prompt as the server read it.
        output_ids: Sampled ids.
        logprobs: One for each output id.
        logprob_ids: The token that each logprob belongs to.
        finish: Why the generation ended: "stop", "length" or another reason of the engine.
        stop: The stop id or stop string that ended it.
        prompt_tokens, completion_tokens, cached_tokens: The server's counts.
        versions: Weight versions as (start, end, version) over the output ids.
        text: The text that the server reports with the ids.
        top_logprobs: For each output id, the most likely tokens as (id, logprob).
        prompt_logprobs: (id, logprob) of the prompt's last tokens, up to its end.
        routed_experts: Base64, as on the wire.
        sampling_masks: For each output id, the ids that the sampler could choose from.
        images: The pictures as sent, in order; None for one that was sent by name only.
        image_names: The client's name of each picture, by which a server may keep it, or None.
        image_spans: (offset, length) of each picture's placeholders in the prompt, as the server reports them.
        image_tokens: The server's count of all placeholders.
        answered_id: The id by which the answer names its request, as the server writes it.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    images: list[bytes | None] = field(default_factory=list)
    image_names: list[str | None] = field(default_factory=list)
    image_spans: list[tuple[int, int]] | None = None
    image_tokens: int | None = None
    echoed_ids: list[int] | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    logprob_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: int | str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    versions: list[tuple[int, int, str | None]] | None = None
    text: str | None = None
    top_logprobs: list[list[tuple[int, float | None]]] | None = None
    prompt_logprobs: list[tuple[int, float | None]] = field(default_factory=list)
    routed_experts: str | None = None
    sampling_masks: list[list[int]] | None = None
    answered_id: str | None = None


ReadExchange = Callable[[WireExchange], WireGeneration | None]
"""Reads one complete, successful exchange. Returns None if the exchange is not a generation."""


def generations(read: ReadExchange, exchanges: Iterable[WireExchange]) -> list[WireGeneration]:
    """Read every complete, successful generation. Scores and information requests are left out.

    Args:
        read: The reader of the engine's wire.
        exchanges: The HTTP exchanges, in order.
    """
    complete = [exchange for exchange in exchanges if exchange.status == 200 and exchange.whole and exchange.sent]
    return [generation for exchange in complete if (generation := read(exchange)) is not None]


def data_of(url: str | None) -> bytes | None:
    """Decode a data URL; None without one."""
    return base64.b64decode(url.partition(",")[2]) if url else None


def documents(exchange: WireExchange) -> list[Any]:
    """Return the JSON documents of a response: one, or one for each event of a stream."""
    text = exchange.got.decode()
    if not text.lstrip().startswith("data:"):
        return [json.loads(text)]
    lines = (line[5:].strip() for line in text.splitlines() if line.startswith("data:"))
    return [json.loads(line) for line in lines if line != "[DONE]"]
