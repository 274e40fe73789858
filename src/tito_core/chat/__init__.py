"""Strands messages to template messages to content-safe token deltas.

`template` is the way in. A turn runs `messages` (translation), `rendering` (Jinja over `traced` strings), `delta` with
`ending` (which part of the rendering is new), `encoder` and, where it is due, `comparison`. Certification runs once for
a template: `certify` with `probes`, `switches` and `images`, judged by `referee`.

What leans on private or undocumented parts of other packages, with the test (`tests/chat`) that notices a change:

- jinja2, `rendering`: `CodeGenerator._output_child_pre` and its `visit_` methods, `Template.root_render_func`, the
  `_block_vars` and `_loop_vars` of macro calls, `make_attrgetter`, `jinja_pass_arg`, and the sandbox's
  `wrap_str_format`: `test_environment` compares with Jinja's own results over plain strings.
- jinja2, `switches`: its syntax tree (`nodes`): `test_switches`.
- transformers, `referee`: `_compile_jinja_template`, and the copies of reasoning that `_alias_reasoning_fields` makes:
  `test_referee` compares with `apply_chat_template`.
- transformers, `template`: the parameters that `apply_chat_template` keeps for itself: `test_template`.
- tokenizers, `encoder`: the order of a serialised definition (`truncation` and `padding` first, `model` last), its
  pre-tokenizers and `prepend_scheme`, and that two tokenizers can share a model: `test_inert_tokenizer` and
  `test_word_cache` compare with the tokenizer itself.
- strands, `message_check`: the annotations of `ContentBlock` and `ToolResultContent`: `test_message_check`.
"""

from tito_core.chat.encoder import ContentSafeEncoder, EncodedText
from tito_core.chat.messages import UnsupportedContentError
from tito_core.chat.rendering import TemplateError
from tito_core.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "ContentSafeEncoder", "EncodedText", "TemplateError", "UnsupportedContentError"]
