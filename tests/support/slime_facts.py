"""The recorded contract of slime's `Sample`: a type with its field and status names, and a check of each field's type.

None of slime's code is here. slime's own `Sample` is tested too if SLIME_SRC points to its source.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import field, make_dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

CONTRACT = json.loads(
    (Path(__file__).resolve().parents[1] / "export" / "slime_sample.json").read_text(encoding="utf-8")
)
SOURCE = os.environ.get("SLIME_SRC")
"""Folder of slime's source, or None."""

_Status = Enum("_Status", CONTRACT["statuses"])  # type: ignore[misc]
_FILLED: dict[str, Any] = {"metadata": dict, "tokens": list, "response": str, "weight_versions": list}
Recorded = make_dataclass(
    "Recorded",
    [(name, Any, field(default_factory=_FILLED.get(name, lambda: None))) for name in CONTRACT["fields"]],
    namespace={"Status": _Status},
)
"""An object with the recorded fields, each None or empty, and the recorded statuses."""


def adapter(annotation: str) -> TypeAdapter[Any]:
    """Return a check of a field's type; where slime takes a tensor, of an array, of which slime makes one."""
    places = {"Any": Any, "torch": SimpleNamespace(Tensor=np.ndarray)}
    return TypeAdapter(eval(annotation, places), config={"arbitrary_types_allowed": True})


def check_types(sample: Any, names: list[str]) -> None:
    """Check that fields have their recorded types.

    Raises:
        pydantic.ValidationError: A field has another type.
    """
    for name in names:
        value = getattr(sample, name)
        adapter(CONTRACT["fields"][name]).validate_python(value, strict=True)
        if isinstance(value, np.ndarray):
            assert value.dtype == np.int32, "as slime's own"
            assert value.ndim == (3 if name == "rollout_routed_experts" else 1)


def arguments(url: str, tokenizer: str, **more: Any) -> Namespace:
    """Return the training arguments of slime that a rollout reads, for a server and a tokenizer's folder."""
    host, port = url.removeprefix("http://").split(":")
    return Namespace(
        **{
            "hf_checkpoint": tokenizer,
            "sglang_router_ip": host,
            "sglang_router_port": int(port),
            "sglang_server_concurrency": 8,
            "rollout_num_engines": 1,
            "rollout_num_gpus": 1,
            "rollout_num_gpus_per_engine": 1,
            "sglang_dp_size": 1,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": 256,
            "rollout_stop": None,
            "rollout_stop_token_ids": None,
            "rollout_skip_special_tokens": False,
            "group_rm": False,
            "partial_rollout": False,
            "custom_reward_post_process_path": "strands_tito.export.slime.rewards_by_group",
            "mask_offpolicy_in_partial_rollout": False,
            **more,
        }
    )


PARAMETERS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 256,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
"""The sampling parameters that slime passes to a generate function."""
