"""A scripted SGLang server, as recorded from SGLang 0.5.23; `KIT` is found by the entry point `tito.wires`.

It judges the backend, and so shares no code with it: it imports the frame of scripted servers alone.
"""

from __future__ import annotations

from strands_tito.testing.wire import WireKit
from tito_sglang.scripted.wire import SGLangWire
from tito_sglang.wire_reader import read

KIT = WireKit(read, SGLangWire)
