"""A scripted vLLM server, modelled on recordings of vLLM 0.32.0. The entry point `tito.wires` finds `KIT`.

It tests the backend, so it shares no code with it: it imports only `strands_tito.testing`.
"""

from __future__ import annotations

from strands_tito.testing.wire import WireKit
from tito_vllm.scripted.wire import VLLMWire
from tito_vllm.wire_reader import read

KIT = WireKit(read, VLLMWire, cache_page=32)
"""The prefix cache of the recorded server has blocks of 32 tokens."""
