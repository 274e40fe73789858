"""SGLang's wire for tests and for the conformance suite: the entry point `tito.wires`."""

from __future__ import annotations

from tito_core.testing.wire_kit import WireKit
from tito_sglang.scripted.wire import SGLangWire
from tito_sglang.wire_reader import read

KIT = WireKit(read, SGLangWire)
