"""vLLM's wire for tests and for the conformance suite: the entry point `tito.wires`."""

from __future__ import annotations

from tito_core.testing.wire_kit import WireKit
from tito_vllm.scripted.wire import VLLMWire
from tito_vllm.wire_reader import read

KIT = WireKit(read, VLLMWire, cache_page=32)
"""Its prefix cache has blocks of 32 tokens, as the recorded server's."""
