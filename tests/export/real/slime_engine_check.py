"""slime's own code on a real SGLang: its loop around our `generate`, and its example for strands-sglang with ours.

Of the example the import is changed, nothing else. The tool that runs what the policy writes, in a process without any
isolation, is replaced by one that evaluates arithmetic. Takes the server's address.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from slime.observability.rollout_data_utils import validate_rollout_id_annotated
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

from strands_tito.export import samples_of
from support import calculating
from support.scripted import tokenizer
from support.slime_facts import PARAMETERS, arguments
from tito_core import Policy
from tito_core.backend.generate import score

EXAMPLE = "examples.strands_sglang.generate_with_strands"
QUESTION = [{"role": "user", "content": "What is 25 * 17?"}]


class Arithmetic:
    """Stands where the example's interpreter does."""

    def __init__(self, **_: Any) -> None: ...

    def run(self, code: str, code_type: str) -> str:
        return "425" if "25" in code and "17" in code else "nothing"


def example() -> Any:
    """Load slime's example with the provider's import changed."""
    spec = importlib.util.find_spec(EXAMPLE)
    assert spec is not None
    assert spec.origin is not None
    theirs = Path(spec.origin).read_text(encoding="utf-8")
    assert theirs.count("from strands_sglang") == 2
    assert theirs.count("strands_sglang") == 2
    module = importlib.util.module_from_spec(spec)
    sys.modules[EXAMPLE] = module
    exec(compile(theirs.replace("from strands_sglang", "from tito_sglang"), spec.origin, "exec"), module.__dict__)
    module.SubprocessInterpreter = Arithmetic
    return module


async def reward(args: Any, sample: Any, **_: Any) -> Any:
    return [1.0] * len(sample) if isinstance(sample, list) else 1.0


async def group(args: Any, prompt: Any, size: int) -> list[Any]:
    SingletonMeta._instances.clear()
    GenerateState(args)
    samples = [Sample(index=i, group_index=0, prompt=prompt, label="425") for i in range(size)]
    return list(await generate_and_rm_group(args, samples, {**PARAMETERS, "max_new_tokens": 64}))


async def confirmed(policy: Policy, sample: Sample) -> int:
    """The lengths are slime's own check's, and the server scores each trained token as recorded."""
    sample._validate_response_metadata_lengths()
    assert Sample.from_dict(sample.to_dict()) == sample
    mask = np.array(sample.loss_mask, bool)
    recorded = np.array(sample.rollout_log_probs, np.float32)
    scores = (await score(policy.backend, sample.tokens))[-len(mask) :]
    assert np.abs(recorded - scores)[mask].max() <= 1e-4
    return int(mask.sum())


async def ours(policy: Policy, url: str, folder: str) -> tuple[int, int]:
    """Run `generate` in slime's loop; some rollouts branch."""
    count = tokens = 0
    for agent in ("make_agent", "make_editing_agent"):
        args = arguments(
            url,
            folder,
            custom_generate_function_path="strands_tito.integrations.slime_generate.generate",
            custom_rm_path="slime_engine_check.reward",
            tito_agent=f"support.calculating:{agent}",
        )
        began = len(calculating.ledgers)
        found = await group(args, calculating.QUESTION, 12)
        validate_rollout_id_annotated([found])
        by_uuid = {ledger.uuid: ledger for ledger in calculating.ledgers[began:]}
        for samples in found:
            expected = samples_of(by_uuid[samples[0].metadata["tito"]["rollout"]])
            assert [sample.tokens for sample in samples] == [each.token_ids.tolist() for each in expected]
            for sample in samples:
                tokens += await confirmed(policy, sample)
                count += 1
        assert any(len(samples) > 1 for samples in found) is (agent == "make_editing_agent")
    return count, tokens


async def theirs(policy: Policy, url: str, folder: str) -> tuple[int, int, int]:
    """Run slime's example in slime's loop, with its own reward."""
    module = example()
    args = arguments(
        url, folder, custom_generate_function_path=f"{EXAMPLE}.generate", custom_rm_path=f"{EXAMPLE}.reward_func"
    )
    samples = await group(args, QUESTION, 6)
    tokens = 0
    for sample in samples:
        assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
        assert isinstance(sample.reward, float)
        assert sample.response == tokenizer().decode(sample.tokens[-sample.response_length :])
        tokens += await confirmed(policy, sample)
    assert module.SGLangModel.__module__.startswith("tito_compat")
    return len(samples), tokens, sum(sample.tool_calls for sample in samples)


async def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer().save_pretrained(folder)
        policy = await Policy.connect_async(backend="sglang", base_url=url, tokenizer=tokenizer())
        count, tokens = await ours(policy, url, folder)
        print(f"our generate in slime's loop: {count} samples, {tokens} trained tokens scored as recorded")
        more, others, calls = await theirs(policy, url, folder)
        print(f"slime's example, import changed: {more} samples, {others} trained tokens, {calls} tool calls")
    print(f"slime on SGLang: ok, {count + more} samples")


if __name__ == "__main__":
    sys.modules["slime_engine_check"] = sys.modules["__main__"]
    asyncio.run(main(sys.argv[1]))
