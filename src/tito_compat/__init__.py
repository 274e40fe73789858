"""What stands behind the names that users of strands-sglang and strands-vllm import.

`tito_sglang` and `tito_vllm` re-export the public names. Their modules that the peers have too, such as
`tito_sglang.tool_parsers.hermes`, are aliases: importing one gives the module of this package that has its names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

_MODULES = {
    "tito_compat.sglang": (
        "tito_sglang.sglang tito_sglang.limiter tito_sglang.tool_limiter tito_sglang.token tito_sglang.utils"
    ),
    "tito_compat.sglang_client": "tito_sglang.client tito_sglang.exceptions",
    "tito_compat.sglang_parsers": (
        "tito_sglang.tool_parser tito_sglang.tool_parsers tito_sglang.tool_parsers.base tito_sglang.tool_parsers.glm "
        "tito_sglang.tool_parsers.hermes tito_sglang.tool_parsers.kimi_k2 tito_sglang.tool_parsers.qwen_xml"
    ),
    "tito_compat.vllm": "tito_vllm.vllm tito_vllm.tool_validation",
    "tito_compat.spans": "tito_vllm.recorder tito_vllm.spans",
    "tito_compat.rollout": "tito_sglang.rollout tito_vllm.token",
}
ALIASES = {alias: module for module, aliases in _MODULES.items() for alias in aliases.split()}
"""The module behind each older name."""


class _Aliases(MetaPathFinder, Loader):
    """Imports the modules of `ALIASES`. An alias is the same module object, so patches and pickles reach one place."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an alias, and None for any other module."""
        if name not in ALIASES:
            return None
        return spec_from_loader(name, self, is_package=any(other.startswith(f"{name}.") for other in ALIASES))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that an alias stands for; it gets the aliases below this one as attributes."""
        module = import_module(ALIASES[spec.name])
        for alias, target in ALIASES.items():
            parent, _, child = alias.rpartition(".")
            if parent == spec.name:
                setattr(module, child, import_module(target))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec again; the import has replaced it by the alias's."""
        module.__spec__ = spec_from_loader(module.__name__, module.__loader__)


sys.meta_path.append(_Aliases())
