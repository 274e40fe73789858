"""Older names of modules. An alias is the same module object, so that patches and pickles reach one place."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

_aliases: dict[str, str] = {}


def alias_modules(aliases: Mapping[str, str]) -> None:
    """Make modules importable by older names, and what is below them too. Nothing is imported before its first use.

    Args:
        aliases: The module behind each older name. A name below another has an entry only where its end differs.
    """
    _aliases.update(aliases)
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Aliases())  # before the finder of files, which would load a second copy


def _target(name: str) -> str | None:
    """Return the module behind an older name, or None."""
    if name in _aliases:
        return _aliases[name]
    above, _, end = name.rpartition(".")
    return f"{found}.{end}" if above and (found := _target(above)) else None


class _Aliases(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an alias, and None for any other module."""
        found = _target(name)
        real = None if found is None else find_spec(found)
        if real is None:
            return None
        has_more = any(other.startswith(f"{name}.") for other in _aliases)
        spec = spec_from_loader(name, self, origin=real.origin, is_package=has_more)
        if spec is not None and real.submodule_search_locations is not None:
            spec.submodule_search_locations = list(real.submodule_search_locations)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that an alias stands for; it gets the aliases below this one as attributes."""
        module = import_module(str(_target(spec.name)))
        for alias, target in _aliases.items():
            parent, _, child = alias.rpartition(".")
            if parent == spec.name:
                setattr(module, child, import_module(target))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import has replaced by that of the alias."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state
