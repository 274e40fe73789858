"""Make LoRA adapters with PEFT, and the same weights merged into the model.

Usage: `python adapter_script.py MODEL_DIR OUT_DIR`. OUT_DIR gets `one`, `two` and `fresh`, as PEFT writes them, and
`one-merged` and `two-merged`, whole models. `fresh` is as PEFT begins a training: its B is 0.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model


def main(model_dir: str, out_dir: str) -> None:
    for seed, name in enumerate(("fresh", "one", "two")):
        base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        torch.manual_seed(seed)
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0))
        for key, tensor in model.named_parameters() if seed else ():
            if "lora_B" in key:
                torch.nn.init.normal_(tensor.data, std=0.02)
        model.save_pretrained(str(Path(out_dir) / name))
        if seed:
            merged = Path(out_dir) / f"{name}-merged"
            shutil.copytree(model_dir, merged, ignore=shutil.ignore_patterns("*.safetensors", "tito_build.json"))
            model.merge_and_unload().save_pretrained(str(merged))


if __name__ == "__main__":
    main(*sys.argv[1:])
