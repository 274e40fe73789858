"""The recipe's own part without a GPU, through slime's code. `run.sh --tiny` passes what it would pass to train.py.

slime's parser reads and validates the arguments, its rollout loop runs `generate` with this agent and tito.yaml on a
scripted SGLang, its own checks read the samples, and `rewards_by_group` makes the rewards of its loss. Megatron and
SGLang are not here: their options are looked up in slime's scripts instead.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import re
import sys
import tempfile
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from strands_tito.export.slime import rewards_by_group
from tito_conformance.testing import Completion, ScriptedRequest, scripted_server
from tito_engines import models

GROUPS = 2
QUESTION, ANSWER = "What is 25 * 17?", "425"
FIRST = ("print(25 * 17)", "print(25 * 18)", "")
"""What the scripted policy runs at first, in turn: the right program, a wrong one, none."""
NOT_HERE = ("slime.backends.sglang_utils.arguments", "slime.backends.sglang_utils.external", "wandb")
"""Modules that import SGLang, and one for a service; the parser of slime's own options needs none of them."""


def arguments_of(argv: list[str], source: Path) -> argparse.Namespace:
    """Return slime's arguments, read and validated by its own code, --custom-config-path included.

    Raises:
        ValueError: An option is in none of slime's scripts either.
    """
    for name in NOT_HERE:
        sys.modules[name] = ModuleType(name)
        imported = ("sglang_parse_args", "validate_args", "apply_external_engine_info_to_args")
        vars(sys.modules[name]).update(dict.fromkeys(imported, lambda args: None))
    from slime.utils.arguments import get_slime_extra_args_provider, slime_validate_args

    for name in NOT_HERE:
        del sys.modules[name]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    args: argparse.Namespace
    args, others = get_slime_extra_args_provider()(parser).parse_known_args(argv)
    scripts = "".join(
        path.read_text("utf-8") for folder in ("scripts", "examples") for path in (source / folder).rglob("*.sh")
    )
    if unknown := {one for one in others if one.startswith("--")} - {*re.findall(r"--[\w-]+", scripts)}:
        raise ValueError(f"Options that slime does not know: {', '.join(sorted(unknown))}.")
    vars(args).update(dict.fromkeys(("debug_rollout_only", "debug_train_only"), False))
    vars(args).update(load_debug_rollout_data=None, train_backend="megatron")  # as its own parse_args sets them
    slime_validate_args(args)
    return args


def policy(tokenizer: Any) -> Any:
    """Return a script: it runs one of three programs, and answers with what the program printed."""
    turns = count()

    def says(request: ScriptedRequest) -> Completion:
        if request.scoring or request.ignore_eos:  # our measurement at connect
            return Completion([5] * request.max_new_tokens, finish="length")
        printed = re.findall(r"\b4[25][50]\b", tokenizer.decode(list(request.prompt_ids)))
        code = "" if printed else FIRST[next(turns) % len(FIRST)]
        call = f'<tool_call>{{"name": "run_python", "arguments": {{"code": "{code}"}}}}</tool_call>'
        text = call if code else f"It is \\boxed{{{printed[-1] if printed else 400}}}."
        return Completion(list(tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)))

    return says


def rollouts(args: argparse.Namespace) -> list[list[Any]]:
    """Return slime's samples of each rollout of `GROUPS` groups, from its own loop."""
    from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
    from slime.utils.types import Sample

    state = GenerateState(args)
    found = []

    async def run() -> None:
        for group in range(GROUPS):
            numbers = range(group * args.n_samples_per_prompt, (group + 1) * args.n_samples_per_prompt)
            prompt = [{"role": "user", "content": QUESTION}]
            samples = [Sample(index=i, group_index=group, prompt=prompt, label=ANSWER) for i in numbers]
            found.extend(await generate_and_rm_group(args, samples, state.sampling_params.copy()))

    asyncio.run(run())
    return found


def check(args: argparse.Namespace, found: list[list[Any]], tokenizer: Any) -> str:
    """Hold the samples to slime's checks and to what the policy said; return a line of figures."""
    from slime.observability.rollout_data_utils import validate_rollout_id_annotated

    validate_rollout_id_annotated([found])
    samples = [sample for rollout in found for sample in rollout]
    raw, normalized = rewards_by_group(args, samples)
    assert len(samples) == len(raw) == GROUPS * args.n_samples_per_prompt
    assert {round(value, 6) for value in raw} == {1.0, -1.05, -1.1}
    for sample, reward, advantage in zip(samples, raw, normalized, strict=True):
        sample._validate_response_metadata_lengths()
        assert sample.status is type(sample).Status.COMPLETED
        assert (reward == 1.0) == (advantage > 0)
        trained = [t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
        assert len(trained) == sample.effective_response_length
        said = tokenizer.decode(trained)
        assert said.count("<tool_call>") == (reward != -1.1)
        assert said.endswith("}.<|im_end|>")
        assert all(logprob < 0 for logprob, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m)
    tokens = sum(sample.effective_response_length for sample in samples)
    return f"{len(samples)} samples, {tokens} trained tokens, rewards {sorted(set(raw))}"


def main() -> None:
    """Do what the module's docstring says."""
    spec = importlib.util.find_spec("slime")
    assert spec is not None
    assert spec.submodule_search_locations
    args = arguments_of(sys.argv[1:], Path(spec.submodule_search_locations[0]).parent)
    tokenizer = models.load_tokenizer("smollm2")
    options: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_ids": [tokenizer.eos_token_id], "max_model_len": 8192}
    options["encode"] = lambda text, special: tokenizer.encode(text, add_special_tokens=special)
    with tempfile.TemporaryDirectory() as folder, scripted_server("sglang", policy(tokenizer), **options) as server:
        tokenizer.save_pretrained(folder)
        host, port = server.base_url.removeprefix("http://").split(":")
        vars(args).update(hf_checkpoint=folder, sglang_router_ip=host, sglang_router_port=int(port))
        vars(args).update(
            sglang_server_concurrency=8, sglang_dp_size=1, rollout_num_gpus=1, rollout_num_gpus_per_engine=1
        )
        for agent in ("retool_agent", "retool_harness"):  # the second one is a harness of another SDK
            args.tito_agent = f"{agent}:make_agent"
            line = check(args, rollouts(args), tokenizer)
            print(f"slime_retool: ok, {agent}: {line}")


if __name__ == "__main__":
    main()
