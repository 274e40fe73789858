"""Write a model's weights and configuration; run as a script by the engine's own interpreter.

It imports torch, transformers, gguf and the standard library, and nothing of ours: torch is
not a dependency of this package, and our package is not installed in an engine's environment.

Usage: `python weights_script.py SPEC.json DIRECTORY`. The spec is a JSON object with

- `architecture`: the transformers class name, `config`: its configuration's fields, `generation`: those of
  generation_config.json;
- either `gguf`: path of a file whose weights are taken (dequantized to float32), or `seed` and `std`: every matrix is
  drawn from a normal distribution, norms are ones.

DIRECTORY receives config.json, generation_config.json and model.safetensors (float32). The last line on stdout is a
JSON object with the versions used and the number of parameters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers


def fresh_model(spec: dict[str, Any]) -> transformers.PreTrainedModel:
    """The architecture with its own initial weights, in float32, free of any quantization setting."""
    cls = getattr(transformers, spec["architecture"])
    config = cls.config_class(**spec["config"], architectures=[spec["architecture"]])
    torch.manual_seed(0)
    return cls(config).to(torch.float32).eval()


# llama.cpp's and transformers' names for the parts of a Llama block.
_BLOCK_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def fill_from_gguf(model: transformers.PreTrainedModel, path: Path) -> None:
    """Dequantize a Llama GGUF into the model.

    Read with the gguf package itself: transformers' own loader needs accelerate, which the engines do not.
    """
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in heads:
                values = _unpermuted(values, heads[part])
            state[f"model.layers.{layer}.{_BLOCK_PARTS[part]}.weight"] = values
        else:
            state[f"{_OUTER_PARTS[name]}.weight"] = values
    if config.tie_word_embeddings:
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, strict=True)


def _unpermuted(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of each head's two rotary halves."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def fill_at_random(model: transformers.PreTrainedModel, seed: int, std: float) -> None:
    """Draw each matrix in the order of its name, so that the result does not hang on the order of construction."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)


def main(spec_path: str, directory: str) -> None:
    """Build what the spec says into the directory."""
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    model = fresh_model(spec)
    if "gguf" in spec:
        fill_from_gguf(model, Path(spec["gguf"]))
    else:
        fill_at_random(model, spec["seed"], spec["std"])
    model.generation_config = transformers.GenerationConfig(**spec["generation"])
    model.save_pretrained(directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, "parameters": parameters}))


if __name__ == "__main__":
    main(*sys.argv[1:])
