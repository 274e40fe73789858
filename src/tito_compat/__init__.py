"""What stands behind the names that the READMEs and examples of strands-sglang and strands-vllm import.

`tito_sglang` and `tito_vllm` re-export the names. Their modules that users import too, such as
`tito_sglang.tool_parsers`, are aliases: importing one gives the module of this package that has its names.
"""

from __future__ import annotations

from importlib import import_module

ALIASES = {
    **dict.fromkeys(
        ("tito_sglang.client", "tito_sglang.tool_limiter", "tito_sglang.tool_parser", "tito_sglang.tool_parsers"),
        "tito_compat.sglang",
    ),
    "tito_vllm.spans": "tito_compat.spans",
}
"""The module behind each older name, which `tito_sglang` and `tito_vllm` make importable."""


def named(package: str, name: str, module: str | None) -> object:
    """Return a name of a peer's package, from the module of this package that has it.

    Raises:
        AttributeError: The package has no such name.
    """
    if module is None:
        raise AttributeError(
            f"module {package!r} has no attribute {name!r}. Of the other provider's names it has those that its README "
            "and examples use; docs/migrating.md says what to use in place of others."
        )
    return getattr(import_module(f"tito_compat.{module}"), name)
