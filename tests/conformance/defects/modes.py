"""Sound servers of unusual modes, which the suite must pass."""

from __future__ import annotations

from conformance.defects.defect import Defect

VLLM = ("vllm", "vllm-completions")
_PROCESSED = {"raw_logprobs": False, "truncated_logprobs": True}

MODES = (
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
)
"""Sound modes of servers, as the recordings of the real ones show them."""
