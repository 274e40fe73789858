"""A scripted vLLM server, as recorded from vLLM 0.32.0; `KIT` is found by the entry point `tito.wires`.

It judges the backend, and so shares no code with it: it imports the frame of scripted servers alone.
"""

from __future__ import annotations

from strands_tito.testing.wire import WireKit
from tito_vllm.scripted.wire import VLLMWire
from tito_vllm.wire_reader import read

KIT = WireKit(read, VLLMWire, cache_page=32)
"""The recorded server's prefix cache has blocks of 32 tokens."""
