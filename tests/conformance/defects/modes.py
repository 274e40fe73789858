"""Sound servers of unusual modes, which the suite must pass."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from conformance.defects.defect import Defect
from tito_conformance.testing import Fault, ScriptedRequest
from tito_core.backend.http.watch import ServerWatch

VLLM = ("vllm", "vllm-completions")
_PROCESSED = {"raw_logprobs": False, "truncated_logprobs": True}


def _speculating(number: int, request: ScriptedRequest) -> Fault | None:
    """Refuse what vLLM refuses with --speculative-config."""
    if not request.min_p and not request.body.get("sampling_params", request.body).get("logit_bias"):
        return None
    message = "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return Fault(status=400, content_type="application/json", body=json.dumps({"error": error}).encode())


def _measured_again() -> AbstractContextManager[Any]:
    """Let the client find again and again that the server may be another one, as after idle seconds."""
    original, asked = ServerWatch.__init__, itertools.count()

    def made(self: ServerWatch, interruptions: Callable[[], int]) -> None:
        original(self, lambda: next(asked) // 100)

    return mock.patch.object(ServerWatch, "__init__", made)


MODES = (
    Defect("speculating", 0, "vLLM with --speculative-config.", options={"fault": _speculating}, wires=VLLM),
    Defect("processed", 0, "vLLM with --logprobs-mode processed_logprobs.", options=_PROCESSED, wires=VLLM),
    Defect(
        "masks",
        0,
        "vLLM with --return-sampling-mask.",
        options={**_PROCESSED, "sampling_masks": True},
        wires=("vllm",),
    ),
    Defect(
        "raw",
        0,
        "SGLang with SGLANG_RETURN_ORIGINAL_LOGPROB=1: raw, but after penalties.",
        options={"raw_logprobs": True},
        wires=("sglang",),
    ),
    Defect("no-tokenizer", 0, "A server with --skip-tokenizer-init.", options={"skip_tokenizer_init": True}),
    Defect("five-top", 0, "vLLM with --max-logprobs 5.", options={"max_logprobs": 5}, wires=VLLM),
    Defect("dense", 0, "A model without experts.", options={"experts": None}),
    *(
        Defect(f"context-{size}", 0, f"A context of {size} tokens.", options={"max_model_len": size})
        for size in (150, 200, 300, 700)
    ),
    Defect("measured-again", 0, "A server that the client measures again meanwhile.", client=_measured_again),
)
"""Sound modes of servers, as the recordings of the real ones show them."""
