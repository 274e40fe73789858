"""Loading a tokenizer, with errors that say what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerError(ValueError):
    """The tokenizer cannot be loaded."""


def load_tokenizer(tokenizer: str | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give a tokenizer object: loaded by name or from a folder, or the object itself.

    Raises:
        TokenizerError: Nothing loads under the name.
    """
    if not isinstance(tokenizer, str):
        return tokenizer
    from transformers import AutoTokenizer  # takes seconds to import, and only this function needs it

    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError, KeyError) as error:
        raise TokenizerError(
            f"No tokenizer loads from {tokenizer!r}: give the model's name on a hub you can reach, or a folder that "
            f"holds tokenizer.json and a chat template. ({str(error).splitlines()[0] if str(error) else error!r})"
        ) from error
    return loaded
