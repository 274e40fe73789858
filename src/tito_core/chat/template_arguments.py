"""Validation of a user's chat template arguments, which are fixed for a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tito_core.chat.message_check import shown


def checked_arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return template arguments that can be passed to `ChatTemplate.of`.

    Raises:
        ValueError: The arguments are not a dict by name, a name is reserved, or a value has no `repr`.
    """
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise ValueError(
            f"template_arguments must be a dict by name, such as {{'enable_thinking': False}}, not {shown(given)}."
        )
    arguments = dict(given or {})
    if reserved := _SET_EACH_TURN & arguments.keys():
        raise ValueError(
            f"template_arguments has {', '.join(sorted(reserved))}, which each turn sets itself: leave it out."
        )
    if reserved := _TRANSFORMERS_PARAMETERS & arguments.keys():
        raise ValueError(
            f"template_arguments has {', '.join(sorted(reserved))}, which apply_chat_template takes itself and no "
            "template reads: leave it out. To change the template, set tokenizer.chat_template."
        )
    for name, value in arguments.items():
        try:
            repr(value)
        except Exception as error:  # too deep, an integer with too many digits, or a `__repr__` that raises
            raise ValueError(
                f"template_arguments[{name[:80]!r}] is {shown(value)}, which has no repr() for the "
                f"certificate ({type(error).__name__}). Use a smaller or simpler value."
            ) from None
    if reserved := _OUR_PARAMETERS & arguments.keys():
        raise ValueError(
            f"template_arguments has {', '.join(sorted(reserved))}, which is not an argument of a chat template. Pass "
            "content_tokens=... to the policy instead."
        )
    return arguments


_SET_EACH_TURN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenizer", "cls"})
_TRANSFORMERS_PARAMETERS = frozenset(
    {
        *("conversation", "conversations", "chat_template", "continue_final_message", "tokenize", "padding"),
        *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens"),
    }
)
"""Parameters of `apply_chat_template` (transformers 5) that never reach a template."""
_OUR_PARAMETERS = frozenset({"content_tokens", "markup", "certificates"})
