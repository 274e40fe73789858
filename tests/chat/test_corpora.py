"""Other projects' templates: each is certified and renders as transformers does, or is refused for a known reason.

Planted defects show that the referee, which shares no code with what it judges, notices differences.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support import corpora, corpus_tokenizers, plain_referee, plain_template, random_chats, stand_in, zoo
from support.budget import PROVE
from support.plain_referee import judge
from tito_core.chat.encoder import EncodedText
from tito_core.chat.template import ChatTemplate, TemplateError

CONVERSATIONS = 3
ALL = tuple(corpora.names())
REASONS: dict[str, list[str]] = json.loads(
    Path(corpora.__file__).with_name("corpora_refused.json").read_text(encoding="utf-8")
)
"""Reasons for refusals, each with the names of the templates."""
REFUSED = {name: reason for reason, names in REASONS.items() for name in names}


def _sample() -> tuple[str, ...]:
    """Return a sample of the certified templates and one refused template for each reason."""
    certified = [name for name in ALL if name not in REFUSED]
    vllm = [name for name in certified if name.startswith("vllm/")]
    refused = [[name for name in names if name in ALL][:1] for names in REASONS.values()]
    return tuple(dict.fromkeys([*certified[::96], *vllm[::16], *(name for names in refused for name in names)]))


NAMES = ALL if PROVE else _sample()
"""Certifying a template takes a third of a second, so `make test` takes a sample."""


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_refused_or_renders_as_transformers_does(name: str) -> None:
    text = corpora.template(name)
    tokenizer = corpus_tokenizers.tokenizer(name, text)
    if name in REFUSED:  # remove a template from the list once it is certified
        with pytest.raises(TemplateError):
            ChatTemplate.of(tokenizer)
        return
    template = ChatTemplate.of(tokenizer)
    verdict = judge(template, tokenizer, (f"{name} {seed}" for seed in range(CONVERSATIONS)))
    assert not verdict.differences, "\n".join(map(str, verdict.differences))
    assert verdict.tails, verdict


def test_every_reason_is_of_a_template_in_the_corpora() -> None:
    assert REFUSED.keys() <= corpora.names(light=False).keys()
    assert len(ALL) > 400


SEEDS = [f"planted {seed}" for seed in range(20)]


class Planted:
    """A certified template with a defect."""

    def __init__(self, template: ChatTemplate, defect: str) -> None:
        self.template, self.defect = template, defect
        self.certificate = template.certificate
        extra = (template.encoder.added["<|im_start|>"],) if defect == "a stop too many" else ()
        self.stop_ids = (*template.stop_ids, *extra)

    def first_prompt(self, *arguments: Any) -> EncodedText:
        return self._planted("prompt", self.template.first_prompt(*arguments))

    def delta(self, *arguments: Any, **named: Any) -> EncodedText:
        if self.defect == "no closer" and arguments[2] is None:
            arguments = (*arguments[:2], self.template.closer_id)
        return self._planted("delta", self.template.delta(*arguments, **named))

    def _planted(self, where: str, encoded: EncodedText) -> EncodedText:
        ids = encoded.ids.tolist()
        match self.defect:
            case "a prompt that ends early" if where == "prompt":
                ids = ids[:-1]
            case "a delta that ends early" if where == "delta":
                ids = ids[:-1]
            case "a delta that says all twice" if where == "delta":
                ids = ids * 2
            case "a doubled closer" if where == "delta":
                ids = [self.template.closer_id, *ids]
        return SimpleNamespace(ids=np.asarray(ids))  # type: ignore[return-value]  # its ids are all that is read


@pytest.mark.parametrize(
    "defect",
    [
        "a prompt that ends early", "a delta that ends early", "a delta that says all twice", "a doubled closer",
        "a stop too many", "no closer",
    ],
)  # fmt: skip
def test_the_referee_notices(defect: str) -> None:
    planted: Any = Planted(zoo.template("qwen2_5"), defect)
    assert judge(planted, zoo.tokenizer("qwen2_5"), iter(SEEDS)).differences


def test_the_referee_accepts_the_template_without_defects() -> None:
    assert not judge(zoo.template("qwen2_5"), zoo.tokenizer("qwen2_5"), iter(SEEDS)).differences


@pytest.mark.parametrize("module", [plain_referee, plain_template, random_chats, stand_in])
def test_the_referee_imports_nothing_that_it_judges(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    found = {
        f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tito_core")
        for name in node.names
    }
    plain = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not any(name.startswith("tito_core") for name in plain)
    allowed = {"tito_core.chat.ending.Opened", "tito_core.chat.template.ChatTemplate"}
    assert found <= {*allowed, "tito_core.chat.template.TemplateError"}
