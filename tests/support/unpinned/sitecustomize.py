"""Lets SGLang keep routed experts on a machine without a GPU: there is no memory to pin for one.

The server registers its buffer with the CUDA runtime whatever the device is. On the path of its Python this stands in
for the two calls, and nothing else of the server is changed.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class NothingToPin:
    """CUDA's runtime where there is none: 0 is success."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0


class _BeforeBuffers(importlib.abc.MetaPathFinder):
    """Never finds anything: it acts once, when the server's buffers are looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "sglang.srt.mem_cache":
            sys.meta_path.remove(self)
            import torch

            torch.cuda.cudart = NothingToPin
        return None


sys.meta_path.insert(0, _BeforeBuffers())
