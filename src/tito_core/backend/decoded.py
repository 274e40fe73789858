"""Answers in JSON, decoded into wire types."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from tito_core.backend.errors import UNREADABLE, ProtocolViolationError
from tito_core.backend.transport import EngineHttp, HttpAnswer

T = TypeVar("T")


def decoded(http: EngineHttp, raw: HttpAnswer, kind: type[T], request_id: str | None = None) -> T:
    """Decode JSON into a wire type, which skips what it does not name.

    Raises:
        ProtocolViolationError: Not JSON, or not of this shape.
    """
    try:
        if raw.body and raw.content_type and "json" not in raw.content_type:
            raise msgspec.DecodeError(f"its content type is {raw.content_type!r}")
        return msgspec.json.decode(raw.body, type=kind)
    except UNREADABLE as error:
        problem = f"but {error}" if raw.body else "but its body is empty"
        at = re.search(r"byte (\d+)", str(error))
        start = max(0, int(at[1]) - 40) if at else 0
        shown = http.hide_key(raw.body[start : start + 80].decode(errors="replace"))
        raise ProtocolViolationError(
            f"{http.backend} at {http.base_url} answered 200, {http.hide_key(problem)}: it says {shown!r}. "
            f"Is this a {http.backend} server, and no proxy's page?",
            backend=http.backend,
            status=200,
            body=http.hide_key(raw.body[:2000].decode(errors="replace")),
            request_id=request_id,
        ) from error
