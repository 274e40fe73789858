"""Declares torchvision's compiled operators just before torchvision is imported. See README.md.

Run from a `.pth` file at the start of every Python of the environment, so it must be cheap: it only registers a
finder, and torch is imported when torchvision is.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # torch drops the declarations when the library object is collected


class _DeclareFirst(importlib.abc.MetaPathFinder):
    """Never finds anything: it acts once when torchvision is looked for, and lets the search go on."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for schema in OPERATORS:
                library.define(schema)
            _libraries.append(library)
        return None


sys.meta_path.insert(0, _DeclareFirst())
