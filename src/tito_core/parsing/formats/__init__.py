"""Tool-call formats. Importing this package imports every module in it, which registers its formats."""

from importlib import import_module
from pkgutil import iter_modules

for _module in sorted(iter_modules(__path__), key=lambda module: module.name):
    import_module(f"{__name__}.{_module.name}")
