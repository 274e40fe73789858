"""Reads the facts of slime's `Sample` off its source: names, types and defaults of its fields, and its statuses."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any


def contract_of(source: Path) -> dict[str, Any]:
    tree = ast.parse((source / "slime/utils/types.py").read_text(encoding="utf-8"))
    (sample,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Sample"]
    (status,) = [node for node in sample.body if isinstance(node, ast.ClassDef) and node.name == "Status"]
    fields = [node for node in sample.body if isinstance(node, ast.AnnAssign)]
    return {
        "fields": {node.target.id: ast.unparse(node.annotation) for node in fields},  # type: ignore[union-attr]
        "statuses": {node.targets[0].id: node.value.value for node in status.body if isinstance(node, ast.Assign)},  # type: ignore[attr-defined]
    }


if __name__ == "__main__":
    print(json.dumps(contract_of(Path(sys.argv[1])), indent=2))
