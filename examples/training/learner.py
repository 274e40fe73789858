"""The learner: torch alone, run by the engine's own interpreter, which has torch, transformers and the model.

It reads one JSON order a line, and answers each with one line. Nothing of ours is imported here, as nothing of ours is
installed there; what arrives is plain columns: token ids, which of them to train, the engine's logprobs, advantages.

    python learner.py MODEL_FOLDER '{"layers": 6, "lr": 2e-5, ...}'
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn


class Half(nn.Module):
    """Some layers of a decoder, over sequences that all begin alike.

    What they begin with (system prompt, tools, worked examples) is computed once, and its gradient is the sum of
    theirs: exact, and several times as fast. Takes ids or hidden states, of the shared part (1, shared) and of the rest
    (rows, columns); gives the hidden states of both.
    """

    def __init__(self, body: nn.Module, layers: nn.ModuleList, norm: nn.Module) -> None:
        super().__init__()
        with torch.device("meta"):  # a frame, which the model's own parts are put into
            self.body = type(body)(body.config)
        self.body.embed_tokens, self.body.rotary_emb = body.embed_tokens, body.rotary_emb
        self.body.layers, self.body.norm = layers, norm
        for number, layer in enumerate(layers):
            layer.self_attn.layer_idx = number  # its place in this half's cache

    def forward(self, shared: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        takes = "inputs_embeds" if shared.is_floating_point() else "input_ids"
        cache = transformers.DynamicCache()
        first = self.body(**{takes: shared}, past_key_values=cache, use_cache=True).last_hidden_state
        cache.batch_repeat_interleave(len(rest))
        return first, self.body(**{takes: rest}, past_key_values=cache, use_cache=True).last_hidden_state


class Learner:
    """A policy, its last layers trainable, and the loss of GRPO on exact ids.

    Args:
        folder: The model's configuration, weights and tokenizer.
        layers: How many of the last layers learn, with the final norm. The others stay as they are, and are computed
            once a batch.
        lr: AdamW's learning rate.
        passes: Optimizer steps on each batch. Only before the first are the rollouts exactly on-policy.
        clip: The ratio's room below and above 1.
    """

    def __init__(self, folder: str, layers: int, lr: float, passes: int, clip: tuple[float, float]) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))  # the engine waits meanwhile
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        body = self.model.model
        self.frozen = Half(body, body.layers[:-layers], nn.Identity())
        self.learning = Half(body, body.layers[-layers:], body.norm)
        self.weights = {k: v for k, v in self.learning.named_parameters() if ".layers." in k or ".norm." in k}
        for weight in self.weights.values():
            weight.requires_grad_(True)
        self.at_start = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.passes, self.clip = passes, clip

    def update(self, batch: str) -> dict[str, Any]:
        """Take optimizer steps on a batch; tell the ratio before each, and how far the policy is from the start.

        The loss of a token is -min(ratio * A, clip(ratio) * A), averaged over all trained tokens of the batch.
        """
        data = self.load(batch)
        at_start, recorded, advantages = self.logprobs(data, self.at_start), data["recorded"], data["advantages"]
        told: dict[str, Any] = {"passes": []}
        for number in range(self.passes):
            with torch.enable_grad():
                now = self.logprobs(data)
                ratio = torch.exp(now - recorded)
                clipped = ratio.clamp(1 - self.clip[0], 1 + self.clip[1])
                loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
                self.optimizer.zero_grad()
                loss.backward()
            told["norm"] = float(nn.utils.clip_grad_norm_(self.weights.values(), 1.0))
            self.optimizer.step()
            ratio, now = ratio.detach(), now.detach()
            if number == 0:
                gap, apart = at_start - now, (now - recorded).abs()
                told["kl"] = (gap.exp() - 1 - gap).mean().item()  # k3: never negative, of little variance
                told["apart"] = [apart.max().item(), apart.quantile(0.99).item(), apart.median().item()]
            edges = [ratio.min().item(), ratio.mean().item(), ratio.max().item()]
            told["passes"].append({"ratio": edges, "clipped": (ratio != clipped.detach()).float().mean().item()})
        return told

    def score(self, batch: str, into: str) -> dict[str, Any]:
        """Write this policy's logprob of every trained token, in the batch's order, float32."""
        np.save(into, self.logprobs(self.load(batch)).numpy())
        return {}

    def save(self, folder: str) -> dict[str, Any]:
        """Write the weights where the engine can load them."""
        self.model.save_pretrained(folder)
        return {}

    def logprobs(self, data: dict[str, Tensor], weights: dict[str, Tensor] | None = None) -> Tensor:
        """Compute log pi(token) of the trained tokens, shape (trained,), under these weights or the policy's own."""
        states = (data["shared"], data["rest"])
        if weights is None:
            _, hidden = self.learning(*states)
        else:
            _, hidden = torch.func.functional_call(self.learning, weights, states)
        logits = self.model.lm_head(hidden[data["before_trained"]])
        return torch.log_softmax(logits, -1).gather(-1, data["trained"][:, None])[:, 0]

    def load(self, path: str) -> dict[str, Tensor]:
        """Read a batch, and run the frozen layers on it.

        Args:
            path: Columns of one shape (rows, n), right-padded: tokens, mask, logprobs; and advantages (rows,).

        Returns:
            Hidden states for the layers that learn, which of them come just before a trained token, and of those
            tokens the ids, the engine's logprobs and the advantages, shape (trained,).
        """
        with np.load(path) as file:
            columns = {name: torch.from_numpy(file[name]) for name in file.files}
        tokens, mask = columns["tokens"].long(), columns["mask"].bool()
        alike = (tokens == tokens[0]).all(0) & ~mask.any(0)
        shared = int(alike.int().cumprod(0).sum()) - 1  # the token before the first that differs predicts it
        if shared < 1:
            raise ValueError("The rows have fewer than two tokens in common: roll out one agent in a batch.")
        states = self.frozen(tokens[:1, :shared], tokens[:, shared:-1])
        before = mask[:, shared + 1 :]
        return {
            "shared": states[0],
            "rest": states[1],
            "before_trained": before,
            "trained": tokens[:, shared + 1 :][before],
            "recorded": columns["logprobs"][mask],
            "advantages": columns["advantages"][:, None].expand(mask.shape)[mask],
        }


def main(folder: str, settings: str) -> None:
    """Answer orders until the input ends. Only answers go to standard output."""
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_grad_enabled(False)
    learner = Learner(folder, **json.loads(settings))
    for line in sys.stdin:
        order = json.loads(line)
        told = getattr(learner, order.pop("do"))(**order)
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
