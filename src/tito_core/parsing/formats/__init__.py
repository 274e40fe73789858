"""Formats of tool calls, one file each; importing this registers them all."""

from tito_core.parsing.formats import (
    deepseek,
    dsml,
    gemma4,
    glm,
    gpt_oss,
    granite,
    hermes,
    kimi_k2,
    llama3_json,
    minimax_m2,
    mistral,
    phi4_mini,
    pythonic,
    qwen3_coder,
    xlam,
)

__all__ = [
    "deepseek",
    "dsml",
    "gemma4",
    "glm",
    "gpt_oss",
    "granite",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "minimax_m2",
    "mistral",
    "phi4_mini",
    "pythonic",
    "qwen3_coder",
    "xlam",
]
