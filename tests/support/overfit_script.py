"""Train a small model until greedy decoding repeats given sequences; run as a script by an engine's interpreter.

It imports torch, transformers and the standard library: the tests do not depend on torch.

Usage: `python overfit_script.py MODEL_DIRECTORY SEQUENCES.json`. The model in the directory is replaced. The file holds
`sequences`, lists of token ids of one length; `learned`, the positions of each whose tokens are to be predicted;
`margin`, by how many nats the right token must lead; and `steps`, how many steps that may take. Each position is
predicted from the ids before it, so that the context of a long conversation is learned with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

RANDOM_ROWS = 4096
"""Rows of the vocabulary, drawn at random in each step, that the right ones are compared with. All rows take 30 times
as long."""
CHECK_EVERY = 25


def hidden_states(model: transformers.PreTrainedModel, ids: torch.Tensor, learned: list[int]) -> torch.Tensor:
    """What the model holds before each learned position, shape (positions, hidden)."""
    before = torch.tensor(learned) - 1
    states: torch.Tensor = model.model(ids[None]).last_hidden_state[0, before]
    return states


def least_margin(model: transformers.PreTrainedModel, sequences: torch.Tensor, learned: list[int]) -> float:
    """By how many nats the right token leads the next best of the whole vocabulary, where it leads least."""
    margins = []
    with torch.no_grad():
        for ids in sequences:
            logits = hidden_states(model, ids, learned) @ model.get_input_embeddings().weight.T
            right = logits.gather(1, ids[learned, None])
            logits.scatter_(1, ids[learned, None], -torch.inf)
            margins.append(float((right[:, 0] - logits.max(dim=1).values).min()))
    return min(margins)


def main(directory: str, sequences_path: str) -> None:
    """Train the model in the directory; exit with status 1 where the margin is not reached."""
    given = json.loads(Path(sequences_path).read_text(encoding="utf-8"))
    sequences, learned = torch.tensor(given["sequences"]), given["learned"]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    table = model.get_input_embeddings().weight
    used = sequences.unique()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    margin = -float("inf")
    for step in range(1, given["steps"] + 1):
        ids = sequences[step % len(sequences)]
        rows = torch.cat([used, torch.randint(len(table), (RANDOM_ROWS,))]).unique()
        logits = hidden_states(model, ids, learned) @ table[rows].T
        loss = torch.nn.functional.cross_entropy(logits, torch.searchsorted(rows, ids[learned]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % CHECK_EVERY == 0:
            margin = least_margin(model, sequences, learned)
            print(f"step {step}: loss {loss.item():.5f}, least margin {margin:.2f} nats", flush=True)
            if margin >= given["margin"]:
                model.save_pretrained(directory)
                return
    sys.exit(f"after {given['steps']} steps the least margin is {margin:.2f} nats, not {given['margin']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
