"""Faults to inject. A fault is a value; a fault policy maps a request to a fault or None."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from strands_tito.testing.script import ScriptedRequest
from strands_tito.testing.wire import WireResponse, sse_text


@dataclass(frozen=True, slots=True)
class Fault:
    """One or several faults of one response.

    The script does not run after `status`, nor after `reset_after=0` or `close_after=0`.

    Attributes:
        status: Status of an error response, with `headers` and `body`.
        headers: Additional response headers.
        body: Bytes that replace the body.
        content_type: Replaces the content type.
        delay: Seconds before the request starts.
        hang: Send nothing until the client disconnects or aborts the request.
        emitted: Tokens that an abort returns after `hang`.
        edit: Changes the decoded JSON response in place, or returns another. For a stream it gets the list of events.
        reset_after: Reset the connection after so many bytes of the body; 0 sends no response at all. The announced
            content length is that of the whole body.
        close_after: Close the connection likewise.
        drip: (bytes, seconds): send the body in pieces of so many bytes with a pause after each.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str | None = None
    delay: float = 0.0
    hang: bool = False
    emitted: int = 0
    edit: Callable[[Any], Any] | None = None
    reset_after: int | None = None
    close_after: int | None = None
    drip: tuple[int, float] | None = None

    @property
    def unanswered(self) -> bool:
        """Whether the script does not run."""
        return self.status is not None or self.reset_after == 0 or self.close_after == 0

    def response(self) -> WireResponse:
        """Return the response of a fault that is `unanswered`."""
        response = WireResponse(self.status or 500, body=self.body or b"")
        return self.apply(replace(response, headers=dict(self.headers)))

    def apply(self, response: WireResponse) -> WireResponse:
        """Return the response with this fault applied to it."""
        body = response.body if self.body is None or self.status is not None else self.body
        if self.edit is not None:
            body = _edited(self.edit, response)
        headers = {**response.headers, **self.headers}
        if self.content_type is not None:
            headers["content-type"] = self.content_type
        return replace(
            response,
            headers=headers,
            body=body,
            reset_after=self.reset_after,
            close_after=self.close_after,
            drip=self.drip,
        )


FaultPolicy = Callable[[int, ScriptedRequest], Fault | None]
"""Maps a request's number (from 0) and the request to its fault, or None."""


def _edited(edit: Callable[[Any], Any], response: WireResponse) -> bytes | tuple[bytes, ...]:
    """Edit a body. The standard library's encoder is used because it writes NaN and Infinity."""
    if isinstance(response.body, bytes):
        value = json.loads(response.body)
        changed = edit(value)
        return json.dumps(value if changed is None else changed, separators=(",", ":"), ensure_ascii=False).encode()
    events = [json.loads(piece.removeprefix(b"data: ")) for piece in response.content.split(b"\n\n")[:-2]]
    changed = edit(events)
    return sse_text([json.dumps(e, separators=(",", ":")).encode() for e in (events if changed is None else changed)])


def always(fault: Fault) -> FaultPolicy:
    """Apply a fault to every request."""
    return lambda number, request: fault


def first(count: int, fault: Fault) -> FaultPolicy:
    """Apply a fault to the first `count` requests."""
    return lambda number, request: fault if number < count else None


def every(step: int, fault: Fault) -> FaultPolicy:
    """Apply a fault to requests 0, step, 2 * step, ..."""
    return lambda number, request: None if number % step else fault


def at(faults: Mapping[int, Fault] | Iterable[tuple[int, Fault]]) -> FaultPolicy:
    """Apply faults to the given request numbers."""
    table = dict(faults)
    return lambda number, request: table.get(number)


THROTTLED = Fault(status=429, headers={"retry-after": "0"}, content_type="application/json", body=b'{"error":"busy"}')
"""429 with a retry delay of 0 seconds."""
UNAVAILABLE = Fault(status=503, body=b"no upstream")
"""503 without JSON, as from a proxy whose server is down."""
