"""Load a tokenizer from a folder or the model hub."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tito_core.entry_points import load, offered
from tito_core.ledger.errors import TITOError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB_TIMEOUT_S = 5.0
"""Seconds to wait for a first answer of the model hub."""
GROUP = "tito.tokenizers"
"""Entry-point group of tokenizers that packages offer by name.

Each is a function `(name: str, *, local_files_only: bool) -> Path` that returns a folder. With `local_files_only` it
raises instead of downloading.
"""


class TokenizerError(TITOError, ValueError):
    """The tokenizer cannot be loaded, or is not a fast one."""


def load_tokenizer(
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase, *, local_files_only: bool = False
) -> PreTrainedTokenizerBase:
    """Return a tokenizer from a folder, an installed package, the model hub's cache or the hub, or the object itself.

    Args:
        tokenizer: A folder, a name that an installed package offers (see `GROUP`), a model's name on the hub, or a
            tokenizer.
        local_files_only: Whether to use only files on this machine.

    Raises:
        TokenizerError: No tokenizer loads from the name, or the object is not a tokenizer of `transformers`.
    """
    if not isinstance(tokenizer, str | os.PathLike):
        return _checked(tokenizer)
    name = os.fspath(tokenizer)
    try:
        is_folder = Path(name).is_dir()
    except (OSError, ValueError) as error:  # too long for a path, or has a NUL character
        raise TokenizerError(
            f"tokenizer={name[:80]!r}... of {len(name)} characters is neither a folder nor a model's name on the hub "
            f"({getattr(error, 'strerror', None) or error}). Check it."
        ) from error
    if is_folder:
        return _load(name, local_files_only=True)
    if (packaged := _load_packaged(name, local_files_only)) is not None:
        return packaged
    if os.path.isabs(name) or name.startswith((".", "~")):
        raise TokenizerError(f"Folder {name!r} does not exist. Check the path.")
    try:
        return _load_cached(name)
    except TokenizerError:
        if local_files_only:
            raise
    try:
        _check_hub(name)
        return _load(name, local_files_only=False)
    except TokenizerError as error:
        if "/" in name:
            raise
        raise TokenizerError(f"{error} {_suggestion(name)}".strip()) from error.__cause__


def _suggestion(name: str) -> str:
    """Return a sentence with the names that installed packages offer."""
    names = offered(GROUP)
    near = "".join(f" Did you mean {each!r}?" for each in difflib.get_close_matches(name.lower(), names, n=1))
    return f"Built-in names: {', '.join(names)}.{near}" if names else ""


def _load_cached(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from the folder of the hub's cache: by name, the hub's client connects even to look there.

    Raises:
        TokenizerError: It is not in the cache, or cannot be loaded.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        files = [try_to_load_from_cache(name, file) for file in ("tokenizer.json", "tokenizer_config.json")]
    except HFValidationError as error:
        raise TokenizerError(f"Cannot load a tokenizer from {name!r} ({error}).") from error
    for found in files:
        if isinstance(found, str):
            loaded = _load(os.path.dirname(found), local_files_only=True)
            loaded.name_or_path = name  # ledgers record it
            return loaded
    raise TokenizerError(f"Tokenizer {name!r} is neither a folder nor in the model hub's cache.")


def _load_packaged(name: str, local_files_only: bool) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that an installed package offers by this name, or None if none does."""
    try:
        folder_of = load(GROUP, name)
        if folder_of is None:
            return None
        folder = folder_of(name, local_files_only=local_files_only)
    except Exception as error:  # another package's code
        raise TokenizerError(f"Tokenizer {name!r} of an installed package cannot be loaded ({error}).") from error
    loaded = _load(os.fspath(folder), local_files_only=True)
    loaded.name_or_path = name  # ledgers record it; the folder exists on this machine only
    return loaded


def _checked(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    if hasattr(tokenizer, "chat_template") and hasattr(tokenizer, "name_or_path"):
        return tokenizer
    hint = " Pass processor.tokenizer." if hasattr(tokenizer, "tokenizer") else ""
    kind = "None" if tokenizer is None else f"of type {type(tokenizer).__name__}"
    raise TokenizerError(
        f"tokenizer is {kind}: give a model's name on the hub, a folder with tokenizer.json, or what "
        f"transformers.AutoTokenizer.from_pretrained returns.{hint}"
    )


def _load(name: str, *, local_files_only: bool) -> PreTrainedTokenizerBase:
    # Rollouts do not need torch, and transformers would warn on each start that it is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # takes seconds to import, and only this function needs it

    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, local_files_only=local_files_only)
    except Exception as error:  # the tokenizers library raises plain `Exception`
        reason = next(iter(str(error).splitlines()), repr(error))
        raise TokenizerError(
            f"Cannot load a tokenizer from {name!r} ({reason}). Pass a model's name on the hub, or a folder with "
            "tokenizer.json and a chat template."
        ) from error
    return loaded


def _check_hub(name: str) -> None:
    """Check once that the hub answers, with its own client's proxies: a load would retry for most of a minute."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # of httpx or httpx2, by the hub's version
        raise TokenizerError(
            f"Tokenizer {name!r} is neither a folder nor in the model hub's cache, and the hub cannot be reached "
            f"({error}). Pass a folder with tokenizer.json, or try again with a connection."
        ) from error
