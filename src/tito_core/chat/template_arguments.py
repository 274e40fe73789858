"""Arguments of a chat template, which are fixed for a rollout: checked where a user writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tito_core.chat.message_check import shown


def checked_arguments(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return template arguments that `ChatTemplate.of` can take beside its own.

    Raises:
        ValueError: They are not a dict by name, or one has a name that no template reads or cannot be written down.
    """
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise ValueError(
            f"template_arguments must be a dict by name, such as {{'enable_thinking': False}}, not {shown(given)}."
        )
    arguments = dict(given or {})
    if taken := _SET & arguments.keys():
        raise ValueError(
            f"template_arguments has {', '.join(sorted(taken))}, which each turn sets itself: leave it out."
        )
    if taken := _READ_BY_TRANSFORMERS & arguments.keys():
        raise ValueError(
            f"template_arguments has {', '.join(sorted(taken))}, which apply_chat_template takes itself and no "
            "template reads: leave it out. Another template is set as tokenizer.chat_template."
        )
    for name, value in arguments.items():
        try:
            repr(value)
        except Exception as error:  # nested too deeply, an integer of thousands of digits, a `__repr__` that raises
            raise ValueError(
                f"template_arguments[{name[:80]!r}] is {shown(value)}, which cannot be written down for the "
                f"certificate ({type(error).__name__}): give a smaller or a simpler value."
            ) from None
    if taken := _OWN & arguments.keys():
        raise ValueError(
            f"template_arguments has {', '.join(sorted(taken))}, which is not an argument of a chat template: give "
            "content_tokens=... next to template_arguments."
        )
    return arguments


_SET = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenizer", "cls"})
_READ_BY_TRANSFORMERS = frozenset(
    {
        *("conversation", "conversations", "chat_template", "continue_final_message", "tokenize", "padding"),
        *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens"),
    }
)
"""Parameters of `apply_chat_template` (transformers 5) that never reach a template."""
_OWN = frozenset({"content_tokens", "markup", "certificates"})
