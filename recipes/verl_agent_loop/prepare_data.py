"""Write GSM8K as verl's train.parquet and test.parquet; `--tiny` makes a few sums instead, without network.

python prepare_data.py FOLDER [--tiny]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets


def row_of(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """Return a row with the columns that verl's dataset and the agent read."""
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "strands",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.split("####")[-1].strip().replace(",", "")},
        "extra_info": {"split": split, "index": index},
    }


def pairs(split: str, tiny: bool) -> Iterable[tuple[str, str]]:
    """Return questions and answers of a split."""
    if tiny:
        return [(f"What is {n} * 17?", f"#### {n * 17}") for n in {"train": (25, 26), "test": (50, 51)}[split]]
    return ((row["question"], row["answer"]) for row in datasets.load_dataset("openai/gsm8k", "main", split=split))


def prepare(folder: Path, *, tiny: bool) -> None:
    """Write both files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [row_of(*pair, split, index) for index, pair in enumerate(pairs(split, tiny))]
        datasets.Dataset.from_list(rows).to_parquet(str(folder / f"{split}.parquet"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    prepare(arguments.folder, tiny=arguments.tiny)
