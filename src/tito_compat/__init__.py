"""What stands behind the names that users of strands-sglang and strands-vllm import.

`tito_sglang` and `tito_vllm` re-export the public names. Their modules that the peers have too, such as
`tito_sglang.tool_parsers.hermes`, are aliases: importing one gives the module of this package that has its names.
"""

from __future__ import annotations

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
"""The module behind each older name, which `tito_sglang` and `tito_vllm` make importable."""
