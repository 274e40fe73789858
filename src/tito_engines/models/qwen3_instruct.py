"""Qwen3's tokenizer with the chat template of Qwen3-4B-Instruct-2507, which has no reasoning."""

from __future__ import annotations

import json
from pathlib import Path

from tito_engines.models import qwen3
from tito_engines.models.fetch import Package, Report
from tito_engines.models.recipe import TokenizerRecipe, tokenizer_directory

_MEMBER = "trl/chat_templates/qwen3_instruct_2507.jinja"
TEMPLATE = Package(
    registry="pypi",
    name="trl",
    version="1.16.0",
    sha256="c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    size=948_205,
    members={_MEMBER: "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326"},
)


def tokenizer(report: Report) -> Path:
    """Return the directory of the tokenizer; build it at the first call.

    Raises:
        ModelUnavailable: A package cannot be fetched.
        WrongHash: A fetched file does not have the pinned hash.
    """
    return tokenizer_directory(RECIPE, report)


def _write(directory: Path, report: Report) -> None:
    qwen3.write_tokenizer(directory, report)
    path, template = directory / "tokenizer_config.json", TEMPLATE.fetch(report) / Path(_MEMBER).name
    config = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": template.read_text(encoding="utf-8")}
    path.write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")


RECIPE = TokenizerRecipe("qwen3-instruct", _write, (qwen3.PACKAGE.sha256, TEMPLATE.sha256, TEMPLATE.members[_MEMBER]))
