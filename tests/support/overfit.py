"""Tiny models that write calls of one format: a real tokenizer and template, and one conversation learned by heart.

The conversation is a question, a call, its result and an answer. Its tokens are those of a rollout over a scripted
engine, so that the model meets the same prompts on a real one. gpt-oss has a module of its own (`support.gptoss`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from strands import Agent
from transformers import AutoTokenizer

from parsing.families import CALL_FAMILIES
from support import zoo
from support.multiplying import ANSWER, QUESTION, multiply
from support.scripted import backend_of
from tito_conformance.testing import Completion, ScriptedRequest, scripted_engine
from tito_core import Policy
from tito_engines.cache import MANIFEST, build_once
from tito_engines.models.recipe import ModelRecipe, TokenizerRecipe, model_directory, tokenizer_directory
from tito_engines.spec import cache_dir

ARGUMENTS = {"a": 25, "b": 17}
SCRIPT = Path(__file__).with_name("overfit_script.py")
ROWS = {"qwen3": 151936}
"""Rows of the published models. With no row after the last token, SGLang 0.5.23 scores another id for that token."""
MARGIN_NATS = 6.0
STEPS = 1500


@dataclass(frozen=True)
class Spoken:
    """A format that a tiny model writes.

    Attributes:
        parser: The name of the parser.
        package: The tokenizer, a key of `zoo.TOKENIZERS`.
        template: The chat template, a name of TRL's wheel.
        stop: The token that ends a turn.
        thought: Reasoning before the call, with the tag that ends it.
    """

    parser: str
    package: str
    template: str
    stop: str
    thought: str = ""

    @property
    def call(self) -> str:
        """The turn that calls the tool, as the policy writes it."""
        return self.thought + CALL_FAMILIES[self.parser].render([("multiply", ARGUMENTS)]) + self.stop

    @property
    def answer(self) -> str:
        return ANSWER + self.stop

    @cached_property
    def recipe(self) -> TokenizerRecipe:
        def write(directory: Path, say: Any) -> None:
            package = zoo.TOKENIZERS[self.package].fetch(say)
            shutil.copyfile(package / "tokenizer.json", directory / "tokenizer.json")
            config = json.loads((package / "tokenizer_config.json").read_text(encoding="utf-8"))
            config |= {"chat_template": zoo.source(self.template), "eos_token": self.stop}
            (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

        members = zoo.TOKENIZERS[self.package].members.values()
        return TokenizerRecipe(f"spoken-{self.parser}", write, (*members, zoo.HASHES[self.template], self.stop))

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(str(tokenizer_directory(self.recipe, _silent)))

    @cached_property
    def model(self) -> ModelRecipe:
        loaded = self.tokenizer
        ids: dict[str, object] = {"bos_token_id": loaded.bos_token_id, "eos_token_id": loaded.eos_token_id}
        config = {
            "vocab_size": ROWS.get(self.package, max(loaded.get_vocab().values()) + 1),
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            **ids,
        }
        return ModelRecipe(
            name=f"spoken-{self.parser}-random",
            summary=f"two random layers under the tokenizer of {self.package}",
            tokenizer=self.recipe,
            spec={
                "architecture": "Qwen3ForCausalLM", "config": config, "seed": 0, "std": 0.02,
                "generation": {"eos_token_id": loaded.eos_token_id},
            },
        )  # fmt: skip

    def conversation(self) -> tuple[list[int], list[int]]:
        """Return the ids of the rollout and the positions that the policy samples."""
        loaded, answers = self.tokenizer, [self.call, self.answer]

        def says(request: ScriptedRequest) -> Completion:
            return Completion(loaded.encode(answers.pop(0), add_special_tokens=False))

        engine = scripted_engine(
            "vllm", says, vocab_size=self.model.spec["config"]["vocab_size"], eos_ids=[loaded.eos_token_id],
            max_model_len=8192, encode=lambda text, special: loaded.encode(text, add_special_tokens=special),
        )  # fmt: skip
        policy = Policy.connect(backend=backend_of(engine, "vllm"), tokenizer=loaded)
        model = policy.model()
        Agent(model=model, tools=[multiply], callback_handler=None)(QUESTION)
        trajectory = model.trajectory
        assert [call.status for turn in model.ledger for call in turn.draft.calls] == ["ok"]
        return trajectory.token_ids.tolist(), trajectory.loss_mask.nonzero()[0].tolist()

    def folder(self, python: Path) -> Path:
        """Return the trained model; `python` is an engine's interpreter, run only if there is something to build."""
        ids, learned = self.conversation()
        given = {"sequences": [ids], "learned": learned, "margin": MARGIN_NATS, "steps": STEPS}
        text = f"{self.model.key}{SCRIPT.read_text(encoding='utf-8')}{json.dumps(given)}"
        key = hashlib.sha256(text.encode()).hexdigest()[:12]

        return learned_by_heart(self.model, f"spoken-{self.parser}-{key}", python, lambda: given)


def learned_by_heart(model: ModelRecipe, name: str, python: Path, given: Callable[[], dict[str, Any]]) -> Path:
    """Return the folder of a model that was trained on token sequences until it repeats them.

    Args:
        model: The model that is trained.
        name: The folder's name in the cache.
        python: An engine's interpreter; run only if there is something to build.
        given: What the training script reads; called only then.
    """

    def build(directory: Path) -> None:
        base = model_directory(model, python, lambda _: None)
        shutil.copytree(base, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        sequences = directory / "sequences.json"
        sequences.write_text(json.dumps(given()), encoding="utf-8")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [str(python), str(SCRIPT), str(directory), str(sequences)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        sequences.unlink()

    return build_once(cache_dir() / "models" / name, build)


@cache
def spoken() -> dict[str, Spoken]:
    """Return the formats whose real tokenizer a package ships, by parser."""
    each = (
        Spoken("hermes", "qwen3", "qwen3_instruct_2507", "<|im_end|>"),
        Spoken("qwen3_coder", "qwen3", "qwen3_5_nothink", "<|im_end|>"),
        Spoken("deepseek_v3", "deepseek", "deepseekv3", "<｜end▁of▁sentence｜>", "I multiply.\n</think>\n\n"),
        Spoken("llama3_json", "llama3", "llama3_1", "<|eot_id|>"),
    )
    return {one.parser: one for one in each}


def _silent(line: str) -> None:
    """Print nothing."""
