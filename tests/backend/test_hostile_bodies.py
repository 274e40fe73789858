"""Endlessly nested bodies, and bodies that are not UTF-8, are protocol violations (laws 4 and 5)."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from support.backends import TRIES, WIRES, Kind, choice, engine_of, in_process_backend, request_of
from tito_conformance.testing import Fault, always
from tito_core.backend import BackendError, ProtocolViolationError
from tito_core.backend.generate import generate
from tito_core.backend.protocol import OptionalOutputs

DEEP = b"[" * 100_000
BODIES = (DEEP, b'{"a":' * 100_000, b'{"choices":' + DEEP, b'{"meta_info":' + DEEP, b'{"\x81":1}', b'{"text":"\xff"}')
EVENTS = tuple(b"data: " + body + b"\n\ndata: [DONE]\n\n" for body in BODIES)


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("kind", WIRES)
async def test_a_hostile_body_is_a_protocol_violation(kind: Kind, body: bytes) -> None:
    backend = in_process_backend(engine_of(kind))
    await backend.connect()
    engine = engine_of(kind, fault=always(Fault(body=body)))
    hostile = in_process_backend(engine)
    hostile._info = await backend.connect()
    with pytest.raises(ProtocolViolationError):
        await generate(hostile, request_of())


@pytest.mark.parametrize("events", EVENTS, ids=range(len(EVENTS)))
@pytest.mark.parametrize("kind", WIRES)
async def test_a_hostile_event_is_a_protocol_violation(kind: Kind, events: bytes) -> None:
    hostile = in_process_backend(engine_of(kind, fault=always(Fault(body=events, content_type="text/event-stream"))))
    hostile._info = await in_process_backend(engine_of(kind)).connect()
    chunks: list[Any] = []
    with pytest.raises(ProtocolViolationError):
        await generate(hostile, request_of(), chunks.append)


@pytest.mark.parametrize("status", [400, 422, 500])
@pytest.mark.parametrize("kind", WIRES)
async def test_a_hostile_refusal_is_a_typed_error(kind: Kind, status: int) -> None:
    fault = Fault(status=status, body=b'{"error":' + DEEP)
    hostile = in_process_backend(engine_of(kind, fault=always(fault)), patience_s=TRIES[2])
    hostile._info = await in_process_backend(engine_of(kind)).connect()
    with pytest.raises(BackendError) as caught:
        await generate(hostile, request_of())
    assert caught.value.status == status
    assert len(str(caught.value)) < 2_000


@pytest.mark.parametrize("kind", WIRES)
async def test_a_stream_that_ends_in_a_nested_error_is_a_typed_error(kind: Kind) -> None:
    events = b'data: {"error":' + DEEP + b"\n\ndata: [DONE]\n\n"
    hostile = in_process_backend(
        engine_of(kind, fault=always(Fault(body=events, content_type="text/event-stream"))), patience_s=TRIES[2]
    )
    hostile._info = await in_process_backend(engine_of(kind)).connect()
    with pytest.raises(BackendError):
        await generate(hostile, request_of(), lambda _: None)


@pytest.mark.parametrize("kind", WIRES)
async def test_an_id_beyond_64_bits_in_an_event_is_a_protocol_violation(kind: Kind) -> None:
    def edit(events: Any) -> None:
        choice(events[0])["output_ids" if kind == "sglang" else "token_ids"][0] = 2**64

    hostile = in_process_backend(engine_of(kind, fault=always(Fault(edit=edit))))
    hostile._info = await in_process_backend(engine_of(kind)).connect()
    with pytest.raises(ProtocolViolationError):
        await generate(hostile, request_of(), lambda _: None)


HEADERS = (
    b"(" * 5_000,
    b"-" * 9_000 + b"1",
    b"{'descr': '<i4'",
    b"'''",
    b"\xff\xfe",
    b"{'descr': '<i4', 'fortran_order': False, 'shape': (9223372036854775808, 0)}",
    b"{'descr': '<i4', 'fortran_order': False, 'shape': (-1, -1)}",
    b"{'descr': '|O', 'fortran_order': False, 'shape': ()}",
    b"{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (1,)}",
)


@pytest.mark.parametrize("version", [b"\1\0", b"\2\0", b"\3\0", b"\xff\xff"])
@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
async def test_a_hostile_array_of_experts_is_a_violation(header: bytes, version: bytes) -> None:
    length = len(header).to_bytes(2 if version == b"\1\0" else 4, "little")
    text = base64.b64encode(b"\x93NUMPY" + version + length + header).decode()

    def edit(answer: Any) -> None:
        choice(answer)["routed_experts"] = text

    hostile = in_process_backend(engine_of("vllm", experts=(2, 2), fault=always(Fault(edit=edit))))
    hostile._info = await in_process_backend(engine_of("vllm", experts=(2, 2))).connect()
    request = replace(request_of(), optional_outputs=OptionalOutputs(routed_experts=True))
    with pytest.raises(ProtocolViolationError):
        await generate(hostile, request)
