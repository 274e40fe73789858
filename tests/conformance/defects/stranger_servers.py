"""The stranger's defects in servers: written by a hand that has not seen what the suite checks."""

from __future__ import annotations

from conformance.defects.stranger_columns import COLUMNS
from conformance.defects.stranger_finishing import FINISHING
from conformance.defects.stranger_hooks import Planted
from conformance.defects.stranger_logprobs import LOGPROBS
from conformance.defects.stranger_sampling import SAMPLING
from conformance.defects.stranger_state import STATE
from conformance.defects.stranger_streams import STREAMS

SERVERS_DEFECTS: list[Planted] = [*SAMPLING, *LOGPROBS, *COLUMNS, *FINISHING, *STREAMS, *STATE]
