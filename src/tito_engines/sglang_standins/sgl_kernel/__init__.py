"""Stand-in for SGLang's compiled kernels on a CPU. See ../README.md.

`assign_req_to_token_pool_cpu` is what `sglang.srt.mem_cache.allocation` (0.5.23) calls on a CPU for each decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Assign each request its new cache slots: `req_to_token[req, start:end]` gets the next slice, in order.

    Shapes: `req_pool_indices`, `start_offset` and `end_offset` are (batch,); `req_to_token` is (requests, pool_len);
    `out_cache_loc` is flat, (sum of end - start,). Writes `req_to_token` in place.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count]
        taken += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a compiled kernel that this CPU environment does not have.")

    return absent


OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Operators of `torch.ops.sgl_kernel` that modules of vision-language models read at their import, 0.5.23."""


def _declare() -> object:
    """Declare the operators, without an implementation: a call raises."""
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in OPERATORS:
        library.define(f"{name}(Tensor x) -> Tensor")
    return library


_library = _declare()  # torch drops the declarations when the library object is collected
