"""The former name of `tito_conformance.testing`."""

from __future__ import annotations

from strands_tito.former_names import former_name

__getattr__ = former_name(
    __name__,
    "tito_conformance.testing",
    {name: name for name in ("moves", "pictures", "strategies")},
)
