"""Stand-in for Triton on a CPU: importable, inert, and loud when a kernel is launched. See ../README.md.

SGLang's modules define Triton kernels at import time and pick a plain-torch path at run time. So every name in
`triton` and below exists, decorators return a kernel object, and only launching one raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

__version__ = "0.0.0"


class _Kernel:
    """What a decorated function becomes."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getitem__(self, grid: object) -> _Kernel:
        return self

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"The Triton kernel {self.__name__} was launched, but this CPU environment has no Triton.")


class _Instance:
    """An instance of an inert class: takes any arguments and keeps them as attributes."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.__dict__.update(kwargs)


class _Inert:
    """Any other name: can be called, subscripted and looked into, and stays inert."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> _Inert | type[_Instance]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _stand_in(f"{self.__name__}.{attribute}")

    def __getitem__(self, key: object) -> _Inert:
        return self

    def __call__(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | _Kernel):
            return _Kernel(args[0].__name__)  # used as a decorator, with or without arguments before
        return self


def _stand_in(name: str) -> _Inert | type[_Instance]:
    """What the dotted name becomes: a class if it is spelled like one (callers use those in `isinstance`)."""
    if name == "triton.runtime.driver":  # real Triton raises here too where there is no GPU, and callers expect it
        raise RuntimeError("0 active drivers: this CPU environment has no Triton.")
    last = name.rpartition(".")[2]
    return type(last, (_Instance,), {}) if last[0].isupper() else _Inert(name)


class _InertModule(types.ModuleType):
    def __getattr__(self, name: str) -> _Inert | type[_Instance]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{self.__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every `triton.x.y` as an inert module, so that any import below `triton` succeeds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("triton."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.insert(0, _Submodules())


def cdiv(x: int, y: int) -> int:
    """Ceiling division; host code uses it to size grids and buffers."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def __getattr__(name: str) -> _Inert | type[_Instance]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _stand_in(f"triton.{name}")
