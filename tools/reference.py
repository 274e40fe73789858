"""Print the docstrings of public names, as the built site shows them: python tools/reference.py NAME ..."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pydoc import locate
from typing import Any


def described(name: str, found: Any) -> Iterator[str]:
    """Yield a name with its signature and docstring, then the same of its public members."""
    signature = str(inspect.signature(found)) if inspect.isroutine(found) and callable(found) else ""
    yield f"{name}{signature}\n{inspect.getdoc(found) or ''}\n"
    for each in members(found):
        member = getattr(found, each)
        is_code = inspect.isroutine(member) or inspect.isclass(member) or isinstance(member, property)
        if is_code and not each.startswith("_"):
            yield from described(f"{name}.{each}", member)


def members(found: Any) -> list[str]:
    """Return what a module lists in `__all__` or else defines, or a class and its bases in the same package define."""
    if inspect.isclass(found):
        package = found.__module__.partition(".")[0]
        bases = [base for base in found.__mro__ if base.__module__.partition(".")[0] == package]
        return list(dict.fromkeys(each for base in bases for each in vars(base)))
    if not inspect.ismodule(found):
        return []
    own = [each for each, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__]
    return list(getattr(found, "__all__", own))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("\n".join(described(name, locate(name))))
