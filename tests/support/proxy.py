"""A TCP proxy that breaks connections at any byte of a request or response."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
from collections import Counter
from dataclasses import dataclass

_LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)
_ID = re.compile(rb'^x-request-id: *(\S+)|"rid":"([^"]+)"', re.IGNORECASE | re.MULTILINE)

AT = (
    "before the request",
    "in the request's head",
    "in the request's body",
    "after the request",
    "in the status line",
    "in the headers",
    "after the headers",
    "in the body",
    "before the last byte",
)
"""Where a connection ends, by class of bytes of an exchange."""
KINDS = ("reset", "close", "late", "drip", "429", "503 storm", "half body", "silence")
STORM = 12
"""Number of requests in a storm."""


@dataclass(frozen=True)
class Plan:
    """What happens to one request."""

    kind: str
    at: str = ""


class Proxy:
    """Listens on loopback, forwards requests to a server, and breaks a share of them.

    Attributes:
        tries: How often each generation's id was sent, without the number that a retry adds to it.
        happened: How often each kind of fault happened, and each place of it.
        share: Of all generations, those that are spoiled; 0 until it is set.
        seconds: Length of what waits: a late answer, a `Retry-After`, a piece of a drip.
    """

    def __init__(self, port: int, seed: int, seconds: float = 0.02) -> None:
        self.tries: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self.share = 0.0
        self.seconds = seconds
        self._port = port
        self._random = random.Random(seed)
        self._storm = 0
        self._deck: list[Plan] = []
        self._kept: list[asyncio.StreamWriter] = []
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=2**22, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        for out in self._kept:
            out.close()

    @property
    def connections(self) -> int:
        """The open client connections."""
        return len(self._open)

    def plan(self) -> Plan:
        """Draw the fate of one generation."""
        if self._storm:
            self._storm -= 1
            return Plan("503 storm")
        if self._random.random() >= self.share:
            return Plan("none")
        if not self._deck:
            self._deck = [Plan(kind, at) for kind in ("reset", "close") for at in AT]
            self._deck += [Plan(kind) for kind in KINDS if kind not in ("reset", "close")] * 2
            self._random.shuffle(self._deck)
        plan = self._deck.pop()
        if plan.kind == "503 storm":
            self._storm = STORM
        return plan

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client closed, or the proxy is shutting down
        finally:
            self._open.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        generation = b"generate" in head.split(b"\r\n", 1)[0]
        plan = self.plan() if generation else Plan("none")
        if plan.at in ("before the request", "in the request's head"):
            return self._end(writer, plan)
        length = _LENGTH.search(head)
        body = b"" if length is None else await reader.readexactly(_cut(int(length[1]), plan))
        if generation and (found := _ID.search(head + body)):
            named = (found[1] or found[2]).decode()
            self.tries[re.sub(r"-retry\d+$", "", named)] += 1
        if plan.at == "in the request's body":
            return self._end(writer, plan)
        if plan.kind in ("429", "503 storm"):
            self._note(plan)
            return await self._refuse(writer, plan)
        answer = await self._asked(head + body, plan, reader)
        if answer is None:
            return self._end(writer, plan)
        return await self._answer(writer, plan, *answer)

    async def _asked(self, request: bytes, plan: Plan, client: asyncio.StreamReader) -> tuple[bytes, bytes] | None:
        """Ask the server; None where the client goes first, as it does when nothing ever comes.

        Of those half are proxies that do not pass it on that their client has gone: an abort by its id is then all
        that ends a request on the server.
        """
        upstream, out = await asyncio.open_connection("127.0.0.1", self._port, limit=2**22)
        gone = asyncio.ensure_future(client.read(1))
        keep = self._random.random() < 0.5
        try:
            await asyncio.sleep(0)
            if gone.done():  # what went before it was passed on has been aborted by now, so it must not begin
                return None
            out.write(request)
            await out.drain()
            if plan.kind == "silence" or plan.at == "after the request":
                await (gone if plan.kind == "silence" else asyncio.sleep(self.seconds))
                self._kept += [out] * keep
                return None
            answer = asyncio.ensure_future(_whole(upstream))
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                self._kept += [out] * keep
                return None
            return answer.result()
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone
            if out not in self._kept:
                out.close()  # the server sees that its client has gone

    async def _answer(self, writer: asyncio.StreamWriter, plan: Plan, head: bytes, body: bytes) -> bool:
        whole, size = head + body, len(head)
        if plan.kind == "none":
            writer.write(whole)
            await writer.drain()
            return True
        self._note(plan)
        draw = self._random.randrange
        cuts = {
            "in the status line": draw(1, 12),
            "in the headers": draw(17, size - 4),
            "after the headers": size,
            "in the body": size + draw(1, max(2, len(body) - 1)),
            "before the last byte": len(whole) - 1,
        }
        if plan.at:
            writer.write(whole[: cuts[plan.at]])
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return self._end(writer, plan, noted=True)
        if plan.kind == "half body":  # of a proxy that counts what it has
            half = body[: len(body) // 2]
            writer.write(re.sub(rb"(?i)content-length: *\d+", b"content-length: %d" % len(half), head) + half)
        elif plan.kind == "drip":
            for start in range(0, len(whole), 1 + len(whole) // 20):
                writer.write(whole[start : start + 1 + len(whole) // 20])
                await writer.drain()
                await asyncio.sleep(self.seconds / 10)
        else:
            await asyncio.sleep(self.seconds)
            writer.write(whole)
        await writer.drain()
        return True

    async def _refuse(self, writer: asyncio.StreamWriter, plan: Plan) -> bool:
        status, more = "503 Service Unavailable", ""
        if plan.kind == "429":
            status, more = "429 Too Many Requests", f"retry-after: {self.seconds}\r\n"
        body = json.dumps({"error": {"message": "busy"}})
        writer.write(f"HTTP/1.1 {status}\r\n{more}content-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        return True

    def _end(self, writer: asyncio.StreamWriter, plan: Plan, *, noted: bool = False) -> bool:
        if not noted:
            self._note(plan)
        if plan.kind == "reset":
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return False

    def _note(self, plan: Plan) -> None:
        self.happened[plan.kind] += 1
        if plan.at:
            self.happened[plan.at] += 1


def _cut(length: int, plan: Plan) -> int:
    return length // 2 if plan.at == "in the request's body" else length


async def _whole(upstream: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await upstream.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    assert length is not None
    return head, await upstream.readexactly(int(length[1]))
