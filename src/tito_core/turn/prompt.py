"""The prompt of a turn: its ids, their text form, and its images. The text form grows turn by turn (law 14)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tito_core.backend.id_text import IdText
from tito_core.backend.images import PromptImages
from tito_core.chat.images import ImageError
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft, Image
from tito_core.policy import PathText, PromptCache
from tito_core.turn.images import collapsed_ids, image_prompt

if TYPE_CHECKING:
    from tito_core.policy import PolicyParts


class Prompt(msgspec.Struct, frozen=True, eq=False):
    """A prompt as it is sent: collapsed, with one placeholder for each image.

    Attributes:
        ids: int32, shape (p,), read-only.
        text: Their text form.
        images: Its images, those of earlier turns included; None for a prompt of text.
    """

    ids: TokenIds
    text: IdText
    images: PromptImages | None = None

    @property
    def new_images(self) -> Sequence[Image]:
        """The images of the turn's own messages."""
        return () if self.images is None else self.images.new

    @classmethod
    def of(
        cls, policy: PolicyParts, ledger: Ledger, parent: int | None, delta: TokenIds, new: Sequence[Image] = ()
    ) -> Prompt:
        """Return the prompt of a path followed by a delta.

        Args:
            policy: The policy.
            ledger: The ledger; it holds the images of earlier turns.
            parent: The turn that the prompt extends, or None.
            delta: The ids of the new messages, with one placeholder for each new image.
            new: The new images, in order.

        Raises:
            ImageError: The delta holds another number of placeholders than new images (law 6), or an earlier turn has
                placeholders that stand for no image (law 4).
        """
        certificate = policy.template.certificate
        # A rollout of text does not walk its path to find no image.
        media = ledger.media(parent) if new or ledger.images else ()
        if media or new:
            prompt = cls(*image_prompt(policy, ledger, parent, media, delta, new))
            _check_written(delta, certificate.media_ids, len(new))
            return prompt
        if certificate.content_tokens == "inert":
            _check_written(delta, ledger.header.media_ids, 0)
        ids = ledger.path_ids(parent, delta)
        return cls(ids, policy._prompts.text(ledger, parent, delta).for_array(ids))

    def checked_path(self, prompts: PromptCache, ledger: Ledger, draft: Draft, output_ids: TokenIds) -> PathText:
        """Return the text of a draft's path, with this prompt and its answer, before the draft is committed.

        Raises:
            LawViolationError: The draft holds other tokens than the request and the response (law 4).
        """
        sent, ids, parent = self.text.then(output_ids), draft.columns.ids, draft.parent
        if self.images is None:
            before = prompts.path(ledger, parent)
            same = sent.continues(before.text, ids) if before else sent.matches(ledger.path_ids(parent, ids))
            path = PathText(sent)
        else:
            same = sent.matches(collapsed_ids(ledger, draft))
            path = PathText(prompts.text(ledger, parent, ids), sent)
        if not same:
            raise LawViolationError(
                4,
                f"turn {len(ledger)} does not hold the tokens of its request and response, so it was not committed. "
                "Report the template or backend that changed them.",
            )
        return path


def _check_written(delta: TokenIds, media_ids: Sequence[int], images: int) -> None:
    """Refuse other placeholders of media than those of the new images: no media span would hold them."""
    written = int(np.count_nonzero(np.isin(delta, media_ids))) if media_ids else 0
    if written != images:
        raise ImageError(
            f"Law 6: the new messages became {written} media placeholders for {images} images, so nothing was sent. "
            "With content_tokens='as-template' remove those that the messages' text spells; else report this template."
        )
