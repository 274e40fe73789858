"""A two-layer Qwen3-VL with random weights, the real Qwen3 tokenizer and a Qwen3-VL chat template.

The tokenizer is the one of `qwen3`: it has the vision tokens. The chat template comes from TRL's package. The image
processor's limits on the size of a picture are far below those of the published models, so that tests stay small.
"""

from __future__ import annotations

import json
from pathlib import Path

from tito_engines.models import qwen3
from tito_engines.models.fetch import Package, Report
from tito_engines.models.recipe import ModelRecipe, TokenizerRecipe

TEMPLATE = Package(
    registry="pypi",
    name="trl",
    version="1.16.0",
    sha256="c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    size=948_205,
    members={
        "trl/chat_templates/qwen3_vl.jinja": "3636d0f0bd6bef02654cdffdc447b79cb2cef8ab02cc75267345946291a489e4",
    },
)
PATCH = 16
"""Side of a patch in pixels."""
MERGE = 2
"""A token stands for `MERGE` x `MERGE` patches."""
_CELL = (PATCH * MERGE) ** 2
MIN_PIXELS, MAX_PIXELS = 4 * _CELL, 64 * _CELL
"""A picture is scaled so that it has 4 to 64 tokens."""

_PROCESSOR: dict[str, object] = {
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    # Servers read one or the other spelling of the limits.
    "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    "min_pixels": MIN_PIXELS,
    "max_pixels": MAX_PIXELS,
}
_PROCESSORS = {
    "preprocessor_config.json": {**_PROCESSOR, "image_processor_type": "Qwen2VLImageProcessorFast"},
    "video_preprocessor_config.json": {**_PROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"},
}


def write_tokenizer(directory: Path, report: Report) -> None:
    """Write the Qwen3 tokenizer, the Qwen3-VL chat template and the processors' settings."""
    qwen3.write_tokenizer(directory, report)
    template = (TEMPLATE.fetch(report) / "qwen3_vl.jinja").read_text(encoding="utf-8")
    settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = template
    _write(directory / "tokenizer_config.json", settings)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name, processor in _PROCESSORS.items():
        _write(directory / name, processor)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


_IDS: dict[str, object] = {"bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": 151643}
_TEXT: dict[str, object] = {
    "vocab_size": 151936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    # The three sections, of time, height and width, add up to half of head_dim.
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
    "dtype": "float32",
    **_IDS,
}
_VISION: dict[str, object] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0],
}

TOKENIZER = TokenizerRecipe(
    name="qwen3-vl",
    write=write_tokenizer,
    ingredients=(qwen3.TOKENIZER.key, *TEMPLATE.members.values(), Path(__file__).read_text(encoding="utf-8")),
)
TINY = ModelRecipe(
    name="qwen3-vl-tiny",
    summary="two-layer Qwen3-VL with random weights, real tokenizer and template, reads pictures (40 MB)",
    tokenizer=TOKENIZER,
    spec={
        "architecture": "Qwen3VLForConditionalGeneration",
        "config": {
            "text_config": _TEXT,
            "vision_config": _VISION,
            "tie_word_embeddings": True,
            "image_token_id": 151655,
            "video_token_id": 151656,
            "vision_start_token_id": 151652,
            "vision_end_token_id": 151653,
        },
        "seed": 3,
        "std": 0.1,
        "generation": {**_IDS, "eos_token_id": [151645, 151643]},
    },
)
