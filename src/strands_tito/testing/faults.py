"""What goes wrong, as plain Python: a fault is a value, a fault policy a function from a request to a fault or None."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from strands_tito.testing.script import ScriptedRequest
from strands_tito.testing.wire import WireResponse, sse_text


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing, or several at once, that happens to one answer.

    Before the script is asked: `delay` (seconds), `status` (with `headers` and `body`, instead of an answer) and
    `reset_after=0` or `close_after=0` (no answer at all). After it: `hang` (no answer until the client gives up or an
    abort arrives, which then finds `emitted` tokens), `edit` (a function that changes the decoded JSON answer in place
    or returns another; for a stream it gets the list of events), `body` (other bytes in place of the answer's),
    `content_type`, `reset_after` and `close_after` (bytes of the body that still arrive; with the whole content length
    announced), and `drip` (bytes, seconds: a slow body).
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
        """The engine never takes the request up: the script is not asked."""
        return self.status is not None or self.reset_after == 0 or self.close_after == 0

    def instead(self) -> WireResponse:
        """The response in place of an answer, for a fault that is `unanswered`."""
        response = WireResponse(self.status or 500, body=self.body or b"")
        return self.spoil(replace(response, headers=dict(self.headers)))

    def spoil(self, response: WireResponse) -> WireResponse:
        """The same response with everything of this fault that happens to an answer."""
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
"""From the request's number (from 0) and the request to what happens to it."""


def _edited(edit: Callable[[Any], Any], response: WireResponse) -> bytes | tuple[bytes, ...]:
    """Re-encoded by the standard library's encoder, which writes NaN and Infinity as they are."""
    if isinstance(response.body, bytes):
        value = json.loads(response.body)
        changed = edit(value)
        return json.dumps(value if changed is None else changed, separators=(",", ":"), ensure_ascii=False).encode()
    events = [json.loads(piece.removeprefix(b"data: ")) for piece in response.content.split(b"\n\n")[:-2]]
    changed = edit(events)
    return sse_text([json.dumps(e, separators=(",", ":")).encode() for e in (events if changed is None else changed)])


def always(fault: Fault) -> FaultPolicy:
    """Every request."""
    return lambda number, request: fault


def first(count: int, fault: Fault) -> FaultPolicy:
    """The first `count` requests."""
    return lambda number, request: fault if number < count else None


def every(step: int, fault: Fault) -> FaultPolicy:
    """Requests 0, step, 2 * step, ..."""
    return lambda number, request: None if number % step else fault


def at(faults: Mapping[int, Fault] | Iterable[tuple[int, Fault]]) -> FaultPolicy:
    """Given requests, by number."""
    table = dict(faults)
    return lambda number, request: table.get(number)


THROTTLED = Fault(status=429, headers={"retry-after": "0"}, content_type="application/json", body=b'{"error":"busy"}')
"""Too many requests; may be sent again at once."""
UNAVAILABLE = Fault(status=503, body=b"no upstream")
"""A proxy without a server behind it: 503, and no JSON."""
