"""A server's properties at connect, checked once for every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tito_core.backend.errors import ProtocolViolationError
from tito_core.backend.images import NO_IMAGES, ImageSupport
from tito_core.backend.optional_outputs import Capabilities
from tito_core.backend.typed_values import is_text, short_repr

MAY_BE_UNREPORTED = frozenset({"response_id", "echoed", "prompt_tokens", "completion_tokens", "media"})
"""Fields of `RawResponse` that some servers cannot report; see `EngineInfo.unreported`. `media`: nor `image_tokens`."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A server's properties at connect.

    Attributes:
        backend: Name of the backend that reports them; see `Backend.name`.
        model: Name of the model in requests.
        max_model_len: Maximum number of tokens of prompt and completion together; None if not reported.
        version: The server's version, or None.
        weight_version: Version of the loaded weights at connect, or None.
        vocab_size: Rows of the model's embedding; a larger id can crash a server. None if not reported.
        endpoints: Paths that generate from token ids, the one in use first.
        processed_logprobs: Whether logprobs include the temperature, as measured; None if not measured.
        truncated_logprobs: Whether logprobs are normalised over the tokens that `top_k`, `top_p` and `min_p` keep, as
            measured; None if not measured.
        capabilities: The optional outputs that the server supports.
        unreported: Fields of `RawResponse`, out of `MAY_BE_UNREPORTED`, that the server's API does not have. The core
            checks them only where they are present, and the suite reports their checks as not applicable.
        images: Whether the server takes images.
        answering_models: How answers name their model, as measured; empty if they do not, or if that was not measured.
        reports_versions: Whether every measured answer had weight versions.
        extra_fields: Names that `SamplingParams.extra` may have; None if unknown, then the server decides.
        raw_before_penalties: Whether raw logprobs are taken before penalties, `min_new_tokens` and engine parameters
            such as a `logit_bias` change the logits. False also where that is unknown.
    """

    backend: str
    model: str
    max_model_len: int | None
    version: str | None
    weight_version: str | None = None
    processed_logprobs: bool | None = None
    vocab_size: int | None = None
    endpoints: tuple[str, ...] = ()
    truncated_logprobs: bool | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    unreported: frozenset[str] = frozenset()
    images: ImageSupport = NO_IMAGES
    raw_before_penalties: bool = False
    extra_fields: frozenset[str] | None = None
    answering_models: frozenset[str] = frozenset()
    reports_versions: bool = False

    def __post_init__(self) -> None:
        """Check every field once, so that turns need not.

        Raises:
            ProtocolViolationError: A field has a wrong type, or a size is not a positive whole number.
        """
        backend = self.backend if is_text(self.backend) else ""
        for name, size in (("max_model_len", self.max_model_len), ("vocab_size", self.vocab_size)):
            if size is not None and (type(size) is not int or size < 1):
                raise ProtocolViolationError(
                    f"{backend} reports {name}={short_repr(size)}, which is not a positive number of tokens. Check how "
                    "the server was started, and any proxy in front of it.",
                    backend=backend,
                )
        for name, (allowed, is_allowed) in _ALLOWED.items():
            value = getattr(self, name)
            if not is_allowed(value):
                raise ProtocolViolationError(
                    f"The backend {backend!r} reports {name}={short_repr(value)}, which must be {allowed}: correct the "
                    "EngineInfo that its connect() returns.",
                    backend=backend,
                )


def _are_capabilities(value: object) -> bool:
    return (
        isinstance(value, Capabilities)
        and (value.top_logprobs is None or (type(value.top_logprobs) is int and value.top_logprobs >= 0))
        and all(type(getattr(value, name)) in (bool, type(None)) for name in _FLAGS)
        and type(value.lower_first) is bool
        and isinstance(value.options, Mapping)
        and all(is_text(word) for pair in value.options.items() for word in pair)
    )


def _is_image_support(value: object) -> bool:
    return (
        isinstance(value, ImageSupport)
        and type(value.accepted) is bool
        and (value.most is None or (type(value.most) is int and value.most >= 0))
        and is_text(value.remedy)
    )


_FLAGS = ("prompt_logprobs", "routed_experts", "expert_shape", "sampling_mask", "priority", "grammar")
_TEXT = ("a string that can be encoded as UTF-8", is_text)
_TEXT_OR_NONE = ("a string that can be encoded as UTF-8, or None", lambda value: value is None or is_text(value))
_MEASURED = ("True, False or None", lambda value: value is None or type(value) is bool)
_ALLOWED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "backend": _TEXT,
    "model": _TEXT,
    "version": _TEXT_OR_NONE,
    "weight_version": _TEXT_OR_NONE,
    "processed_logprobs": _MEASURED,
    "truncated_logprobs": _MEASURED,
    "endpoints": ("a tuple of paths", lambda value: isinstance(value, tuple) and all(map(is_text, value))),
    "capabilities": ("Capabilities, with a count, booleans or None, and the names of options", _are_capabilities),
    "raw_before_penalties": ("True or False", lambda value: type(value) is bool),
    "reports_versions": ("True or False", lambda value: type(value) is bool),
    "answering_models": (
        "a frozenset of names",
        lambda value: isinstance(value, frozenset) and all(map(is_text, value)),
    ),
    "images": ("an ImageSupport, with a boolean, a count or None, and a sentence", _is_image_support),
    "extra_fields": (
        "a frozenset of names, or None",
        lambda value: value is None or (isinstance(value, frozenset) and all(map(is_text, value))),
    ),
    "unreported": (
        "a frozenset of names of MAY_BE_UNREPORTED",
        lambda value: isinstance(value, frozenset) and value <= MAY_BE_UNREPORTED,
    ),
}
"""Allowed values of the fields of `EngineInfo`, except its sizes."""
