"""Strands messages to template messages to content-safe token deltas."""

from tito_core.chat.encoder import ContentSafeEncoder, EncodedText
from tito_core.chat.messages import UnsupportedContentError
from tito_core.chat.rendering import TemplateError
from tito_core.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "ContentSafeEncoder", "EncodedText", "TemplateError", "UnsupportedContentError"]
