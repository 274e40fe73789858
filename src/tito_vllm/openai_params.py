"""Parameters of a turn by OpenAI's names: which are translated, ignored and refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strands.types.tools import ToolChoice

RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
IGNORED = ("logprobs", "stream", "stream_options", "return_token_ids", "chat_template_kwargs", "extra_body", "user")
"""Names that are always set here or read elsewhere. vLLM 0.32 reads no `user`."""


_OF_CHAT = (
    *("chat_template", "documents", "continue_final_message", "add_generation_prompt", "prompt_token_ids"),
    *("mm_processor_kwargs", "media_io_kwargs", "reasoning_effort", "include_reasoning"),
)
"""Fields of vLLM's chat endpoint that change the prompt or the reading of the answer; `/generate` ignores them."""
_AS_HERE = {"continue_final_message": False, "add_generation_prompt": True, "include_reasoning": True}
"""Values that ask for what is done here."""


def merged_params(params: Mapping[str, Any] | None, return_token_ids: bool, disable_tools: bool) -> dict[str, Any]:
    """Return the parameters, with those that other arguments imply."""
    merged = dict(params or {})
    body = dict(merged.get("extra_body") or {})
    if return_token_ids:
        body.setdefault("return_token_ids", True)
    if disable_tools:
        merged.setdefault("tool_choice", "none")
    return {**merged, "extra_body": body}


def response_grammar(response_format: Any) -> dict[str, Any]:
    """Return OpenAI's `response_format` as a parameter of `neutral_sampling`.

    Raises:
        ValueError: An unknown type, or no schema.
    """
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return {"json_schema": dict(schema)}
    raise ValueError(
        f"response_format={response_format!r} is not supported. Use {{'type': 'text'}}, {{'type': 'json_object'}} "
        "or {'type': 'json_schema', 'json_schema': {'schema': ...}}."
    )


def check_unsupported(params: dict[str, Any]) -> None:
    """Remove parameters that ask for nothing, and refuse those that would be ignored.

    Raises:
        ValueError: `parallel_tool_calls` is False, or there are `extra_headers`.
    """
    if params.pop("parallel_tool_calls", None) is False:
        raise ValueError(
            "parallel_tool_calls=False is not supported: the server does not parse calls. Use the hook "
            "LoopLimiter(max_parallel_tool_calls=1)."
        )
    if of_chat := [name for name in _OF_CHAT if (value := params.pop(name, None)) and value is not _AS_HERE.get(name)]:
        raise ValueError(
            f"{', '.join(of_chat)} cannot be set: the server gets token ids and does not render the prompt. Pass the "
            "template's arguments in chat_template_kwargs, and another template as tokenizer.chat_template."
        )
    if headers := params.pop("extra_headers", None):
        raise ValueError(
            f"extra_headers ({', '.join(map(str, headers))}) are not supported. Use api_key for authentication, or "
            "pass backend=VLLMBackend(..., headers=...) to send headers of your own."
        )


def openai_tool_choice(choice: ToolChoice) -> Any:
    """Return Strands' tool choice as OpenAI writes it."""
    match dict(choice):
        case {"auto": _}:
            return "auto"
        case {"any": _}:
            return "required"
        case {"tool": {"name": name}}:
            return {"type": "function", "function": {"name": name}}
    return "auto"
