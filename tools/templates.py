"""Compare every template of the tests' corpora with transformers' plain rendering, and print the results.

    python tools/templates.py [--all] [--newest] [--conversations N] [--seed TEXT] [--only PART] [--json FILE]

Without --all, it takes the templates of the archives that `make test` fetches; TITO_NEWEST=1 means --newest. For a
certified template, random conversations are compared turn by turn; the exit status is 1 if one differs. A refused
template is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import corpora, corpus_tokenizers, structures, zoo
from support.plain_referee import judge
from support.plain_template import Plain
from tito_core.chat.rendering import TemplateError
from tito_core.chat.template import ChatTemplate


@dataclass(frozen=True)
class Row:
    """The result for one template.

    Attributes:
        tokenizer: Name of the real tokenizer, or "stand-in".
        certified: Name of the candidate, or "" if the template was refused.
        reason: Why the template was refused.
        tools: Whether its certificate covers tools; `plain_tools`: whether the plain rendering shows them.
        whole: Turns after which all ids so far were compared; `tails`: turns whose delta was compared.
        different: The first difference of each conversation.
    """

    template: str
    tokenizer: str
    certified: str = ""
    reason: str = ""
    tools: bool = False
    plain_tools: bool = False
    conversations: int = 0
    whole: int = 0
    tails: int = 0
    refused_turns: int = 0
    skipped_turns: int = 0
    different: tuple[str, ...] = ()

    def cells(self) -> str:
        """Return the row of a table."""
        outcome = self.certified or f"refused: {self.reason}"
        facts = (self.template, self.tokenizer, outcome, "yes" if self.tools else "no", self.conversations)
        counts = (self.tails, self.whole, len(self.different), self.different[0] if self.different else "")
        return (
            f"| {' | '.join(str(fact).replace('|', chr(92) + '|').replace(chr(10), ' ') for fact in facts + counts)} |"
        )


HEADS = ("template", "tokenizer", "certified", "tools", "conversations", "deltas", "whole", "different", "first")


def sources(only: str, *, light: bool, newest: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield each template's name, its tokenizer's kind, and the tokenizer with the template."""
    for name in () if newest else zoo.NAMES:
        if only in f"trl/{name}":
            yield f"trl/{name}", zoo.family(name).tokenizer or "stand-in", zoo.tokenizer(name)
    for name in structures.STRUCTURES:
        if only in f"ours/{name}":
            yield f"ours/{name}", "stand-in", structures.tokenizer(name)
    pinned = ((name, corpora.template(name)) for name in corpora.names(light=light, plain=True) if only in name)
    for name, text in corpora.newest() if newest else pinned:
        if only in name:
            kind = corpus_tokenizers.family(name, text, light=light) or "stand-in"
            yield name, kind, corpus_tokenizers.tokenizer(name, text, light=light)


def examine(name: str, kind: str, tokenizer: Any, conversations: int, seed: str = "") -> Row:
    """Certify a template and compare it with the plain rendering over random conversations."""
    try:
        template = ChatTemplate.of(tokenizer)
    except TemplateError as error:
        return Row(name, kind, reason=str(error).splitlines()[0])
    verdict = judge(template, tokenizer, (f"{name} {seed}{i}" for i in range(conversations)))
    reading = Plain(tokenizer).reading
    return Row(
        name,
        kind,
        template.certificate.candidate,
        tools=template.certificate.tools,
        plain_tools=reading is not None and reading.tools,
        conversations=verdict.conversations,
        whole=verdict.whole,
        tails=verdict.tails,
        refused_turns=verdict.refused,
        skipped_turns=verdict.skipped,
        different=tuple(map(str, verdict.differences)),
    )


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description="Compare chat templates with transformers' plain rendering.")
    parser.add_argument("--all", action="store_true", help="also the large archives (124 MB more)")
    newest = bool(os.environ.get("TITO_NEWEST"))
    parser.add_argument(
        "--newest", action="store_true", default=newest, help="the newest versions instead of the pinned ones"
    )
    parser.add_argument("--conversations", type=int, default=20, metavar="N", help="conversations for each template")
    parser.add_argument("--seed", default="", help="seed of the conversations")
    parser.add_argument("--only", default="", metavar="PART", help="only templates whose name contains PART")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to FILE")
    arguments = parser.parse_args()
    rows: list[Row] = []
    print(f"| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}")
    for name, kind, tokenizer in sources(arguments.only, light=not arguments.all, newest=arguments.newest):
        rows.append(examine(name, kind, tokenizer, arguments.conversations, arguments.seed))
        print(rows[-1].cells(), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n")
    counts = Counter("certified" if row.certified else "refused" for row in rows)
    wrong = [row.template for row in rows if row.different]
    turns = sum(row.tails for row in rows)
    print(
        f"\n{counts['certified']} certified, {counts['refused']} refused, {turns} deltas compared over "
        f"{arguments.conversations} conversations each; {len(wrong)} different: {', '.join(wrong) or 'none'}"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
