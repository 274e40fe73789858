"""Raise the likelihood of given answers; run as a script by an engine's own interpreter, which has torch.

Usage: `python tuning_script.py MODEL_DIR ROLLOUTS.json OUT_DIR`. `ROLLOUTS.json` is a list of [prompt ids, answer ids].
OUT_DIR receives the model's weights after one step of gradient descent for each answer.
"""

from __future__ import annotations

import json
import shutil
import sys

import torch
import transformers


def main(model_dir: str, rollouts_path: str, out_dir: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with open(rollouts_path) as file:
        rollouts = json.load(file)
    for prompt, answer in rollouts:
        ids = torch.tensor([prompt + answer])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    shutil.copytree(model_dir, out_dir)
    model.save_pretrained(f"{out_dir}/new")
    shutil.move(f"{out_dir}/new/model.safetensors", f"{out_dir}/model.safetensors")
    shutil.rmtree(f"{out_dir}/new")


if __name__ == "__main__":
    main(*sys.argv[1:])
