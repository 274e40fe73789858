"""The seam to the network: a `Carrier` sends a request to a server and returns its `Reply`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tito_core.backend.bodies import BodyTooLargeError, decode_pieces, read_start, read_whole, text_of
from tito_core.backend.id_text import Pieces


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer whose head has come.

    Attributes:
        status: HTTP status.
        headers: Names in lower case; the values of a repeated name are joined with commas.
        raw: The body as it comes, not decompressed. Raises aiohttp.ClientError or OSError where it breaks off.
        aclose: Releases the connection, which is kept where the whole body was read.
    """

    status: int
    headers: Mapping[str, str]
    raw: AsyncIterator[bytes]
    aclose: Callable[[], Awaitable[None]]

    @property
    def kind(self) -> str:
        """The content type; empty where the server names none."""
        return self.headers.get("content-type", "")

    @property
    def _encoding(self) -> str:
        return self.headers.get("content-encoding", "")

    async def whole(self, limit: int) -> bytes:
        """Read the body to its end, decompressed.

        Raises:
            BodyTooLargeError: It is longer than `limit` bytes, or its announced length is.
            UndecodableBodyError: It does not match its Content-Encoding.
        """
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise BodyTooLargeError(limit)
        return await read_whole(self.pieces(), limit)

    def pieces(self) -> AsyncIterator[bytes]:
        """Read the body as it comes, decompressed.

        Raises:
            UndecodableBodyError: It does not match its Content-Encoding.
        """
        return decode_pieces(self.raw, self._encoding) if self._encoding else self.raw

    async def text(self, limit: int) -> str:
        """Read at most `limit` bytes of the body as text; see `text_of`."""
        return text_of(await read_start(self.raw, limit), self._encoding, self.kind, limit)


class Carrier(Protocol):
    """Connections to one server, of one event loop. `Pool` is what users run; tests and recorders bring their own."""

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> Reply:
        """Send one request; return the answer once its head has come.

        Args:
            method: Such as "POST".
            url: The whole address.
            headers: Those of this request, the length of a body in pieces among them.
            body: Pieces are sent one after the other; none is so large that it would block the event loop.

        Raises:
            aiohttp.ClientError, OSError: No answer came; see `error_from_failure` for what each becomes.
        """

    async def aclose(self) -> None:
        """Close all connections."""
