"""A scripted SGLang server, modelled on recordings of SGLang 0.5.23. The entry point `tito.wires` finds `KIT`.

It tests the backend, so it shares no code with it: it imports only `strands_tito.testing`.
"""

from __future__ import annotations

from strands_tito.testing.wire import WireKit
from tito_sglang.scripted.wire import SGLangWire
from tito_sglang.wire_reader import read

KIT = WireKit(read, SGLangWire)
