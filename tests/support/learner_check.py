"""Compare the learner with a plain computation, one sequence at a time; run by an engine's interpreter with torch.

python learner_check.py EXAMPLES/training MODEL_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHARED, ROWS = 20, 3


def batch_file(vocabulary: int, path: Path) -> str:
    draw = np.random.default_rng(1)
    tokens = np.zeros((ROWS, 40), np.int32)
    mask = np.zeros(tokens.shape, bool)
    tokens[:, :SHARED] = draw.integers(0, vocabulary, SHARED)
    for row, length in enumerate((40, 33, 27)):  # the rest is padding
        tokens[row, SHARED:length] = draw.integers(0, vocabulary, length - SHARED)
        mask[row, SHARED + row : length : 2] = True
    logprobs = np.where(mask, draw.normal(-8, 3, tokens.shape), 0).astype(np.float32)
    np.savez(
        path, tokens=tokens, mask=mask, logprobs=logprobs, advantages=draw.normal(0, 1, tokens.shape).astype(np.float32)
    )
    return str(path)


def plain_logprobs(model: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    found = []
    for tokens, mask in zip(data["tokens"], data["mask"], strict=True):
        scores = torch.log_softmax(model(tokens[None], use_cache=False).logits[0, :-1], -1)
        found.append(scores.gather(-1, tokens[1:, None])[:, 0][mask[1:]])
    return torch.cat(found)


def main(training: str, folder: str) -> None:
    sys.path.insert(0, training)
    import learner

    torch.set_grad_enabled(False)
    policy = learner.Learner(folder, layers=1, lr=1e-3, passes=1, clip=(0.2, 0.28))
    path = batch_file(policy.model.config.vocab_size, Path(sys.argv[3]) / "batch.npz")
    with np.load(path) as file:
        columns = {name: torch.from_numpy(file[name]) for name in file.files}
    columns["tokens"] = columns["tokens"].long()
    data = policy.load(path)
    plain = plain_logprobs(policy.model, columns)
    assert torch.equal(policy.logprobs(data, policy.at_start), policy.logprobs(data))
    torch.testing.assert_close(policy.logprobs(data), plain, atol=1e-4, rtol=0)

    before = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    with torch.enable_grad():
        ratio = torch.exp(plain_logprobs(policy.model, columns) - columns["logprobs"][columns["mask"]])
        advantages = columns["advantages"][columns["mask"]]
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).mean()
        wanted = torch.autograd.grad(loss, list(policy.weights.values()))
    scores = Path(sys.argv[3]) / "scores.npy"
    policy.update(path, str(scores))  # leaves its gradients, scaled down to norm 1 at most
    np.testing.assert_allclose(np.load(scores), plain.numpy(), atol=1e-4)
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in wanted))
    for weight, gradient in zip(policy.weights.values(), wanted, strict=True):
        torch.testing.assert_close(weight.grad, gradient / norm.clamp(min=1), atol=1e-5, rtol=1e-3)
    changed = {name for name, weight in policy.model.named_parameters() if not torch.equal(weight, before[name])}
    last = policy.model.config.num_hidden_layers - 1
    learning = {name for name in before if f"layers.{last}." in name or name == "model.norm.weight"}
    assert changed == learning, changed ^ learning
    print("the same")


if __name__ == "__main__":
    main(*sys.argv[1:3])
