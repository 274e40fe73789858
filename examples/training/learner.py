"""The learner, a script for the interpreter of the engine's environment, which has torch and transformers.

It reads one JSON order per line and answers each with one line. strands-tito is not installed in that environment, so
nothing of it is imported; a batch is plain columns: token ids, loss mask, the engine's logprobs and advantages.

    python learner.py MODEL_FOLDER '{"layers": 6, "lr": 2e-5, ...}'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn


class Half(nn.Module):
    """Some layers of a decoder, over sequences with a common prefix.

    The prefix (system prompt, tools, worked examples) is computed once; the result and the gradient are exact, and
    several times as fast. Takes ids or hidden states of the prefix (1, shared) and of the rest (rows, columns); returns
    the hidden states of both.
    """

    def __init__(self, body: nn.Module, layers: nn.ModuleList, norm: nn.Module) -> None:
        super().__init__()
        with torch.device("meta"):  # without weights; the model's own modules are inserted below
            self.body = type(body)(body.config)
        self.body.embed_tokens, self.body.rotary_emb = body.embed_tokens, body.rotary_emb
        self.body.layers, self.body.norm = layers, norm
        for number, layer in enumerate(layers):
            layer.self_attn.layer_idx = number  # index in this half's cache

    def forward(self, shared: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states of both parts."""
        takes = "inputs_embeds" if shared.is_floating_point() else "input_ids"
        cache = transformers.DynamicCache()
        first = self.body(**{takes: shared}, past_key_values=cache, use_cache=True).last_hidden_state
        cache.batch_repeat_interleave(len(rest))
        return first, self.body(**{takes: rest}, past_key_values=cache, use_cache=True).last_hidden_state


class Learner:
    """A policy with trainable last layers, or a LoRA adapter of them, and the clipped loss on the sampled ids.

    Args:
        folder: The model's configuration, weights and tokenizer.
        layers: Number of last layers to train, with the final norm. The others are frozen and run once per batch.
        lr: AdamW's learning rate.
        passes: Optimizer steps on each batch. The rollouts are exactly on-policy only before the first.
        clip: Clipping range of the ratio below and above 1.
        rank: Rank of the adapter that PEFT trains instead of these layers' weights; 0 for none.
        dropped: Layers to leave out of the model, which makes a smaller one with the same vocabulary.
    """

    def __init__(
        self,
        folder: str,
        layers: int,
        lr: float,
        passes: int,
        clip: tuple[float, float],
        rank: int = 0,
        dropped: Sequence[int] = (),
    ) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(
            int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
        )  # the engine is idle meanwhile
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        body, config = self.model.model, self.model.config
        body.layers = nn.ModuleList(layer for number, layer in enumerate(body.layers) if number not in dropped)
        config.num_hidden_layers = len(body.layers)
        self.saved = adapted(self.model, rank, range(len(body.layers))[-layers:]) if rank else self.model
        self.frozen = Half(body, body.layers[:-layers], nn.Identity())
        self.learning = Half(body, body.layers[-layers:], body.norm)
        learning = ("lora_",) if rank else (".layers.", ".norm.")
        self.weights = {k: v for k, v in self.learning.named_parameters() if any(part in k for part in learning)}
        for weight in self.weights.values():
            weight.requires_grad_(True)
        self.at_start = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.passes, self.clip = passes, clip

    def update(self, batch: str, into: str) -> dict[str, Any]:
        """Take optimizer steps on a batch; return the ratio before each, and the distance from the initial policy.

        The logprobs before the first step are written as `score` does.
        The loss of a token is -min(ratio * A, clip(ratio) * A), averaged over all trained tokens of the batch.
        """
        data = self.load(batch)
        at_start, recorded, advantages = self.logprobs(data, self.at_start), data["recorded"], data["advantages"]
        stats: dict[str, Any] = {"passes": []}
        for number in range(self.passes):
            with torch.enable_grad():
                now = self.logprobs(data)
                ratio = torch.exp(now - recorded)
                clipped = ratio.clamp(1 - self.clip[0], 1 + self.clip[1])
                loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
                self.optimizer.zero_grad()
                loss.backward()
            stats["norm"] = float(nn.utils.clip_grad_norm_(self.weights.values(), 1.0))
            self.optimizer.step()
            ratio, now = ratio.detach(), now.detach()
            if number == 0:
                gap, apart = at_start - now, (now - recorded).abs()
                stats["kl"] = (gap.exp() - 1 - gap).mean().item()  # the k3 estimator: non-negative, low variance
                np.save(into, now.numpy())
                stats["apart"] = [apart.max().item(), apart.quantile(0.99).item(), apart.median().item()]
            edges = [ratio.min().item(), ratio.mean().item(), ratio.max().item()]
            stats["passes"].append({"ratio": edges, "clipped": (ratio != clipped.detach()).float().mean().item()})
        return stats

    def score(self, batch: str, into: str) -> dict[str, Any]:
        """Write the policy's logprobs of all trained tokens, in the batch's order, float32."""
        np.save(into, self.logprobs(self.load(batch)).numpy())
        return {}

    def save(self, folder: str) -> dict[str, Any]:
        """Write the weights, or the adapter, to a folder from which the engine loads them."""
        self.saved.save_pretrained(folder)
        return {}

    def logprobs(self, data: dict[str, Tensor], weights: dict[str, Tensor] | None = None) -> Tensor:
        """Return log pi(token) of the trained tokens, shape (trained,), under `weights` or the current ones."""
        states = (data["shared"], data["rest"])
        if weights is None:
            _, hidden = self.learning(*states)
        else:
            _, hidden = torch.func.functional_call(self.learning, weights, states)
        logits = self.model.lm_head(hidden[data["before_trained"]])
        return torch.log_softmax(logits, -1).gather(-1, data["trained"][:, None])[:, 0]

    def load(self, path: str) -> dict[str, Tensor]:
        """Read a batch and run the frozen layers on it.

        Args:
            path: Columns tokens, mask, logprobs and advantages, shape (rows, n), right-padded.

        Returns:
            Hidden states for the trained layers, the positions just before a trained token, and the ids, engine
            logprobs and advantages of the trained tokens, shape (trained,).
        """
        with np.load(path) as file:
            columns = {name: torch.from_numpy(file[name]) for name in file.files}
        tokens, mask = columns["tokens"].long(), columns["mask"].bool()
        alike = (tokens == tokens[0]).all(0) & ~mask.any(0)
        shared = int(alike.int().cumprod(0).sum()) - 1  # the last common token predicts the first different one
        if shared < 1:
            raise ValueError("The rows share fewer than two leading tokens: use one agent per batch.")
        states = self.frozen(tokens[:1, :shared], tokens[:, shared:-1])
        before = mask[:, shared + 1 :]
        return {
            "shared": states[0],
            "rest": states[1],
            "before_trained": before,
            "trained": tokens[:, shared + 1 :][before],
            "recorded": columns["logprobs"][mask],
            "advantages": columns["advantages"][mask],
        }


def adapted(model: nn.Module, rank: int, layers: Sequence[int]) -> nn.Module:
    """Put a LoRA adapter whose B is 0 into some layers of a model, and return PEFT's model around it."""
    from peft import LoraConfig, get_peft_model

    found = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = [name for name in found if any(f".layers.{number}." in name for number in layers)]
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=chosen))


def main(folder: str, settings: str) -> None:
    """Answer orders until the input ends. Standard output carries only answers."""
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_grad_enabled(False)
    learner = Learner(folder, **json.loads(settings))
    for line in sys.stdin:
        order = json.loads(line)
        stats = getattr(learner, order.pop("do"))(**order)
        print(json.dumps(stats), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
