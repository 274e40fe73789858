"""Cached clients and tokenizers, by the names that users of strands-sglang import."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from strands_tito.compat.rollout import decode_routed_experts
from tito_core.chat.tokenizer import load_tokenizer
from tito_sglang.client import (
    DEFAULT_MAX_CONNECTIONS,
    SGLangClient,
    SlimeArguments,
    slime_address,
    slime_connections,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["decode_routed_experts", "get_client", "get_client_from_slime_args", "get_tokenizer"]


@cache
def get_client(
    base_url: str,
    *,
    max_connections: int = DEFAULT_MAX_CONNECTIONS,
    timeout: float | None = 900.0,
    connect_timeout: float = 5.0,
    max_retries: int = 60,
    retry_delay: float = 1.0,
) -> SGLangClient:
    """Return the cached client of a server with these settings; see `SGLangClient`."""
    return SGLangClient(
        base_url,
        max_connections=max_connections,
        timeout=timeout,
        connect_timeout=connect_timeout,
        max_retries=max_retries,
        retry_delay=retry_delay,
    )


def get_client_from_slime_args(
    args: SlimeArguments,
    *,
    timeout: float | None = 900.0,
    connect_timeout: float = 5.0,
    max_retries: int = 60,
    retry_delay: float = 1.0,
) -> SGLangClient:
    """Return the cached client of slime's router; see `SGLangClient`."""
    return get_client(
        slime_address(args),
        max_connections=slime_connections(args),
        timeout=timeout,
        connect_timeout=connect_timeout,
        max_retries=max_retries,
        retry_delay=retry_delay,
    )


@cache
def get_tokenizer(tokenizer_path: str) -> PreTrainedTokenizerBase:
    """Return the cached tokenizer of a name or folder. Code of a model's repository is never run.

    Raises:
        TokenizerError: The tokenizer cannot be loaded.
    """
    return load_tokenizer(tokenizer_path)
