"""Translate sampling parameters from the names of an engine or of OpenAI to the engine-neutral names."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from tito_core.backend.sampling import SamplingParams

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_TEXT_ONLY = frozenset(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"))
"""Options of the response's text, which is not used: only ids are read."""


def neutral_sampling(
    params: Mapping[str, Any],
    *,
    renamed: Mapping[str, str],
    ignored: Collection[str] = (),
    passed: Collection[str] = ("logit_bias",),
) -> dict[str, Any]:
    """Return the parameters as arguments of `SamplingParams`, which refuses names that are still unknown.

    Args:
        params: Parameters as the user wrote them. None means not set.
        renamed: Neutral names by the provider's names.
        ignored: Names that have no effect on sampling.
        passed: Names that are passed to the engine unchanged.

    Raises:
        ValueError: `n` or `beam_width` is not 1.
    """
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = dict(params.get("extra") or {})
    for name, value in params.items():
        name = renamed.get(name, name)
        if value is None or name == "extra" or name in _TEXT_ONLY or name in ignored:
            continue
        if name in ("n", "beam_width"):
            if value != 1:
                raise ValueError(f"{name}={value!r} is not supported: a turn has one sample. Make n rollouts instead.")
        elif name in _GRAMMARS:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            fields["grammar"] = {"kind": name, "value": text}
        elif name == "stop" and isinstance(value, str):
            fields["stop"] = (value,)
        elif name in passed and name not in SamplingParams.model_fields:
            extra[name] = value
        else:
            fields[name] = value
    return {**fields, "extra": extra} if extra else fields
