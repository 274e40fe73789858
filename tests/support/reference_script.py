"""What transformers computes for given ids; run as a script by an engine's own interpreter, which has torch.

Usage: `python reference_script.py MODEL_DIR IDS.json OUT.npz [TEMPERATURE]`. `IDS.json` is a list of sequences. For
sequence n OUT holds `logprobs_n`, shape (len - 1, vocabulary), of every token after the first, and of a
mixture-of-experts model `experts_n`, shape (len, layers, experts a token), likeliest expert first.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import transformers


def main(model_dir: str, ids_path: str, out_path: str, temperature: str = "1.0") -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with open(ids_path) as file:
        sequences = json.load(file)
    found = {}
    routes = hasattr(model.config, "num_experts")
    for number, ids in enumerate(sequences):
        with torch.no_grad():
            options = {"output_router_logits": True} if routes else {}
            answer = model(torch.tensor([ids]), **options)
        scores = torch.log_softmax(answer.logits[0, :-1].float() / float(temperature), -1)
        found[f"logprobs_{number}"] = scores.numpy()
        if routes:
            layers = [logits.topk(model.config.num_experts_per_tok, -1).indices for logits in answer.router_logits]
            found[f"experts_{number}"] = torch.stack(layers, 1).numpy().astype(np.int32)
    np.savez(out_path, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
