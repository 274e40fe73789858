"""Write a model's weights and configuration; run as a script by the engine's own interpreter.

It imports torch, transformers, gguf (through transformers) and the standard library, and nothing of ours: torch is
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

import torch
import transformers


def fresh_model(spec: dict[str, Any]) -> transformers.PreTrainedModel:
    """The architecture with its own initial weights, in float32, free of any quantization setting."""
    cls = getattr(transformers, spec["architecture"])
    config = cls.config_class(**spec["config"], architectures=[spec["architecture"]])
    torch.manual_seed(0)
    return cls(config).to(torch.float32).eval()


def fill_from_gguf(model: transformers.PreTrainedModel, path: Path) -> None:
    """Copy a GGUF's weights; transformers undoes llama.cpp's permutation of the rotary halves."""
    source = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.load_state_dict(source.state_dict(), strict=True)


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
