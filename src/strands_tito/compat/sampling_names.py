"""Sampling parameters by the names of an engine or of OpenAI -> the engine-neutral ones."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from tito_core.backend.sampling import SamplingParams

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_TEXT_ONLY = frozenset(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"))
"""What the server makes of its answer's text, of which nothing is read: the ids are."""


def neutral_sampling(
    given: Mapping[str, Any],
    *,
    renamed: Mapping[str, str],
    ignored: Collection[str] = (),
    passed: Collection[str] = ("logit_bias",),
) -> dict[str, Any]:
    """Translate; what stays unknown is refused by `SamplingParams`, which suggests the nearest name.

    Args:
        given: Parameters as the user wrote them. None is as if it were not there.
        renamed: Neutral names, by the other ones.
        ignored: Names of what does not change what is sampled.
        passed: Names of what goes to the engine as it is.

    Raises:
        ValueError: More than one sample a request is asked for.
    """
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = dict(given.get("extra") or {})
    for name, value in given.items():
        name = renamed.get(name, name)
        if value is None or name == "extra" or name in _TEXT_ONLY or name in ignored:
            continue
        if name == "n":
            if value != 1:
                raise ValueError(f"n={value} asks for several samples a request: make so many rollouts instead.")
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
