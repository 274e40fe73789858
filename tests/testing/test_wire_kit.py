"""A third party's wire is found by its entry point, scripted and read by the suite, as ours are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.distributions import write_distribution
from support.scripted import BACKENDS
from tito_conformance.testing import Replay, WireKit, find_wire, installed_wires, scripted_engine, scripted_server
from tito_conformance.wire import WireExchange, generations

pytestmark = pytest.mark.suite

TOY = """
import json
from tito_conformance.wire import WireGeneration
from tito_conformance.testing.script import ScriptedRequest
from tito_conformance.testing.wire import Generation, WireResponse, json_response
from tito_conformance.testing.wire import WireKit


class ToyWire:
    name = "toy"

    def __init__(self, state):
        self.state = state

    def route(self, method, path, headers, body):
        sent = json.loads(body)
        request = ScriptedRequest(
            tuple(sent["ids"]), sent["most"], eos_ids=self.state.eos_ids, vocab_size=self.state.vocab_size
        )
        return Generation([request], self.written)

    def written(self, answers, seconds):
        [answer] = answers
        return json_response({"ids": answer.output_ids, "logprobs": answer.logprobs, "why": answer.finish})

    def script_error(self, message):
        return WireResponse(400, {}, message.encode())

    def queue_full(self):
        return None


def read(exchange):
    sent, got = json.loads(exchange.sent), json.loads(exchange.got)
    if "most" not in sent:
        return None
    return WireGeneration("a", sent["ids"], sent, output_ids=got["ids"], logprobs=got["logprobs"], finish=got["why"])


KIT = WireKit(read, ToyWire, cache_page=4)
READ_ALONE = WireKit(read)
"""
POINTS = "[tito.wires]\ntoy = toy_wire:KIT\ntoy-read = toy_wire:READ_ALONE\n"


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(write_distribution(tmp_path, "toy_wire", TOY, POINTS)))
    yield
    sys.modules.pop("toy_wire", None)
    find_wire.cache_clear()


@pytest.mark.usefixtures("_installed")
def test_it_is_scripted_and_read() -> None:
    body = {"ids": [1, 2, 3], "most": 8}
    with scripted_server("toy", Replay([[5, 6, 2]]), eos_ids=[2]) as server:
        got = httpx.post(f"{server.base_url}/sample", json=body, trust_env=False)
    assert server.engine.requests[0].prompt_ids == (1, 2, 3)
    assert server.engine.state.cache.page == 4
    exchange = WireExchange("POST", "/sample", {}, json.dumps(body).encode(), 200, bytearray(got.content), whole=True)
    other = WireExchange("POST", "/sample", {}, b"{}", 200, bytearray(b"{}"), True)
    [generation] = generations(find_wire("toy").read, [exchange, other])
    assert (generation.prompt_ids, generation.output_ids, generation.finish) == ([1, 2, 3], [5, 6, 2], "stop")
    assert generation.logprobs == got.json()["logprobs"]


@pytest.mark.usefixtures("_installed")
def test_a_wire_may_have_a_reader_alone() -> None:
    assert find_wire("toy-read").read
    with pytest.raises(ValueError, match=r"'toy-read'.*no scripted server"):
        scripted_engine("toy-read", Replay([]))


def test_an_unknown_name_lists_the_installed_ones() -> None:
    with pytest.raises(ValueError, match="Unknown wire 'toy'") as raised:
        scripted_server("toy", Replay([]))
    assert ", ".join(installed_wires()) in str(raised.value)
    assert {*BACKENDS} <= {*installed_wires()}


@pytest.mark.parametrize("kind", BACKENDS)
def test_ours_are_kits_too(kind: str) -> None:
    kit = find_wire(kind)
    assert isinstance(kit, WireKit)
    assert kit.wire is not None
    assert scripted_engine(kind, Replay([])).wire.name == kind


def test_a_later_event_without_details_takes_no_cached_count_back() -> None:
    sent = {"prompt": [1], "logprobs": 0}
    usage: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": 1}
    events = [{"usage": {**usage, "prompt_tokens_details": one}} for one in (None, {"cached_tokens": 32}, None)]
    got = "".join(f"data: {json.dumps({**event, 'choices': []})}\n\n" for event in events)
    path, headers = "/v1/completions", {"x-request-id": "r"}
    exchange = WireExchange("POST", path, headers, json.dumps(sent).encode(), 200, bytearray(got.encode()), whole=True)
    [generation] = generations(find_wire("vllm").read, [exchange])
    assert generation.cached_tokens == 32
