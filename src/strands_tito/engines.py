"""The former name of `tito_engines`."""

from __future__ import annotations

from strands_tito.former_names import former_name

__getattr__ = former_name(__name__, "tito_engines", {name: name for name in ("install", "models")})
