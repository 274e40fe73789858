"""The certificate: evidence that a chat template's deltas equal its own rendering (law 7).

Certificates are cached on disk, one small file per template, tokenizer and set of template arguments.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal

import platformdirs

ContentTokens = Literal["inert", "as-template"]


class Thinking(StrEnum):
    """What a template does with the reasoning of earlier answers."""

    KEPT = "kept"
    STRIPPED = "stripped at the next question"
    ALWAYS_STRIPPED = "shown in the last answer only"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of certifying a template.

    Attributes:
        template: sha256 of the template's source, hex.
        tokenizer: sha256 of the tokenizer's definition, hex.
        arguments: The template arguments as text.
        candidate: Name of the chosen candidate for the delta.
        passed: Names of the probes on which the delta equals the template's own rendering.
        refused: Probes that the template itself refuses, each with the reason.
        rewrites: Where the template renders earlier messages differently from how they were sampled or prompted.
        thinking: What the template does with the reasoning of earlier answers.
        tools: Whether probes with tool results passed.
        needs_tools: Whether the template works only with tools.
        content_tokens: "inert", or "as-template" where content may become control tokens.
        placeholder: The control token that the template writes for an image, or None if it takes no images.
        images: Places where images are certified: "user messages", "tool results".
        images_refused: The other places, each with the reason.
        media_ids: Ids of the vocabulary's placeholders of images, videos and audio; empty if it takes no images.
        switches: Words that change what the template writes later if an earlier message holds them, as `/no_think`.
        system_switches: Such words in the system prompt.
        whole_history: Whether a delta after a word of `switches` is rendered with the whole history, and not with the
            history up to that word.
    """

    template: str
    tokenizer: str
    arguments: str
    candidate: str
    passed: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    rewrites: tuple[str, ...]
    thinking: Thinking
    tools: bool
    content_tokens: ContentTokens = "inert"
    needs_tools: bool = False
    placeholder: str | None = None
    images: tuple[str, ...] = ()
    images_refused: tuple[tuple[str, str], ...] = ()
    media_ids: tuple[int, ...] = ()
    switches: tuple[str, ...] = ()
    system_switches: tuple[str, ...] = ()
    whole_history: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the certificate as `tito template check` prints it."""
        yield f"template   sha256 {self.template}"
        yield f"tokenizer  sha256 {self.tokenizer}"
        yield f"delta      rendered {self.candidate}"
        yield f"probes     {len(self.passed)} equal to the template's own rendering, 0 different"
        only = ", and it works only with tools" if self.needs_tools else ""
        yield f"tools      {f'yes{only}' if self.tools else 'no: the template shows none'}"
        yield f"images     {f'{self.placeholder} in ' + ' and '.join(self.images) if self.images else 'no'}"
        for place, reason in self.images_refused if self.images else ():
            yield f"           not in {place}: {reason}"
        for probe, reason in self.refused:
            yield f"refuses    {probe}: {reason}"
        for rewrite in self.rewrites:
            yield f"rewrites   {rewrite}"
        for words, place, own in (
            (self.system_switches, "the system prompt", "the rollout's own system prompt"),
            (self.switches, "messages", f"the rollout's history{'' if self.whole_history else ' up to the last one'}"),
        ):
            if words:
                yield f"switches   {', '.join(map(repr, words))} in {place}: later deltas are rendered with {own}"
        yield f"reasoning  {self.thinking}"
        yield f"thinking   'keep' {_KEEP[self.thinking]}; 'as-template' {_AS_TEMPLATE[self.thinking]}"
        inert = "no control token comes from content" if self.content_tokens == "inert" else "content may write tokens"
        yield f"content    {self.content_tokens}: {inert}"

    def to_json(self) -> str:
        """Return the certificate as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Load a certificate from the output of `to_json`.

        Raises:
            ValueError: The text is not a certificate.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["passed"] = tuple(fields["passed"])
            fields["refused"] = tuple((probe, reason) for probe, reason in fields["refused"])
            fields["rewrites"] = tuple(fields["rewrites"])
            fields["images"], fields["media_ids"] = tuple(fields["images"]), tuple(fields["media_ids"])
            fields["images_refused"] = tuple((place, reason) for place, reason in fields["images_refused"])
            fields["thinking"] = Thinking(fields["thinking"])
            for name in ("switches", "system_switches"):
                fields[name] = tuple(fields.get(name, ()))
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a certificate of a chat template: {error!r}. Delete it to certify again.") from error


_KEEP = {
    Thinking.KEPT: "keeps it, as the template does",
    Thinking.STRIPPED: "keeps what was sampled, where the template would strip it",
    Thinking.ALWAYS_STRIPPED: "keeps what was sampled, where the template would strip it",
    Thinking.NOT_SHOWN: "keeps what was sampled",
}
_AS_TEMPLATE = {
    Thinking.KEPT: "does the same",
    Thinking.STRIPPED: "branches at each question after an answer with reasoning",
    Thinking.ALWAYS_STRIPPED: "branches after each answer with reasoning",
    Thinking.NOT_SHOWN: "branches after each answer with reasoning",
}


def default_folder() -> Path:
    """Return the folder of certificates: under `TITO_CACHE_DIR` if set, else under the platform's cache directory."""
    chosen = os.environ.get("TITO_CACHE_DIR")
    return (Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("tito"))) / "certificates"


class CertificateStore:
    """Reads and writes cached certificates. An unusable folder or a bad file counts as a cache miss."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()

    def key(self, *facts: str) -> str:
        """Return the cache key for these facts and the current version of this package."""
        return hashlib.sha256("\0".join((_code(), *facts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def load(self, key: str) -> Certificate | None:
        """Return a certificate, or None where none is cached."""
        try:
            return Certificate.from_json((self.folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def save(self, key: str, certificate: Certificate) -> None:
        """Write a certificate atomically."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(dir=self.folder, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(certificate.to_json())
            os.replace(path, self.folder / f"{key}.json")
        except OSError:
            return  # certified again next time, which takes a tenth of a second


@cache
def _code() -> str:
    """Return a digest of this package: a certificate is valid only for the code that made it."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
