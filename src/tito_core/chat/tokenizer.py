"""Loading a tokenizer, with errors that say what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB_WITHIN_S = 5.0
"""How long a model hub may take to answer at all, in seconds."""


class TokenizerError(ValueError):
    """The tokenizer cannot be loaded."""


def load_tokenizer(
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase, *, local_files_only: bool = False
) -> PreTrainedTokenizerBase:
    """Return a tokenizer object: from a folder, from the model hub's cache, from the hub, or the object itself.

    Args:
        tokenizer: A name, a folder or the object.
        local_files_only: Do not ask the hub.

    Raises:
        TokenizerError: Nothing loads under the name, or the object is not a tokenizer of `transformers`.
    """
    if not isinstance(tokenizer, str | os.PathLike):
        return _checked(tokenizer)
    name = os.fspath(tokenizer)
    try:
        is_folder = Path(name).is_dir()
    except (OSError, ValueError) as error:  # too long for a path, or with a NUL
        raise TokenizerError(
            f"tokenizer={name[:80]!r}... of {len(name)} characters is neither a folder nor a model's name on the hub "
            f"({getattr(error, 'strerror', None) or error}): check it."
        ) from error
    if is_folder:
        return _load(name, local_files_only=True)
    if os.path.isabs(name) or name.startswith((".", "~")):
        raise TokenizerError(f"There is no folder {name!r} to load a tokenizer from: check the path.")
    try:
        return _load(name, local_files_only=True)
    except TokenizerError:
        if local_files_only:
            raise
        _expect_hub(name)
        return _load(name, local_files_only=False)


def _checked(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    if hasattr(tokenizer, "chat_template") and hasattr(tokenizer, "name_or_path"):
        return tokenizer
    inner = " Give its tokenizer, processor.tokenizer." if hasattr(tokenizer, "tokenizer") else ""
    shown = "None" if tokenizer is None else f"of type {type(tokenizer).__name__}"
    raise TokenizerError(
        f"tokenizer is {shown}: give a model's name on the hub, a folder with tokenizer.json, or what "
        f"transformers.AutoTokenizer.from_pretrained returns.{inner}"
    )


def _load(name: str, *, local_files_only: bool) -> PreTrainedTokenizerBase:
    # Without torch, which rollouts do not need, transformers would say so at every start.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # takes seconds to import, and only this function needs it

    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, local_files_only=local_files_only)
    except Exception as error:  # the tokenizers library raises bare ones
        said = next(iter(str(error).splitlines()), repr(error))
        raise TokenizerError(
            f"No tokenizer loads from {name!r} ({said}): give a model's name on the hub, or a folder with "
            "tokenizer.json and a chat template."
        ) from error
    return loaded


def _expect_hub(name: str) -> None:
    """Ask the hub for a sign of life once: its own client would try for most of a minute."""
    import httpx
    from huggingface_hub import constants

    try:
        httpx.head(constants.ENDPOINT, timeout=HUB_WITHIN_S)
    except httpx.HTTPError as error:
        raise TokenizerError(
            f"The tokenizer {name!r} is in no folder and not in the model hub's cache, and the hub cannot be reached "
            f"({error}): give a folder with tokenizer.json, or try again with a connection."
        ) from error
