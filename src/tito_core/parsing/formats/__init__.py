"""Formats of tool calls, a family a file; importing this registers them all."""

from tito_core.parsing.formats import (
    deepseek,
    dsml,
    gemma4,
    glm,
    gpt_oss,
    hermes,
    json_array,
    kimi_k2,
    llama3_json,
    minimax_m2,
    mistral,
    pythonic,
    qwen3_coder,
)

__all__ = [
    "deepseek",
    "dsml",
    "gemma4",
    "glm",
    "gpt_oss",
    "hermes",
    "json_array",
    "kimi_k2",
    "llama3_json",
    "minimax_m2",
    "mistral",
    "pythonic",
    "qwen3_coder",
]
