"""Pictures through slime's own data path: its conversion of samples, its tensors, and the micro-batch of its actor.

Packages that slime imports there for GPUs, Ray and logging are replaced by stubs; torch and slime's own code are real.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch

from strands_tito.export.slime import complete_aborted, fan_out
from support.picture_ledgers import PAD, seen, two_images

STUBBED = frozenset(("ray", "sglang", "sglang_router", "megatron", "wandb", "mbridge"))
_KEYS = ("tokens", "loss_masks", "multimodal_train_inputs", "total_lengths", "response_lengths")


class Parallel:
    """Megatron's `mpu` on one device."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 1 if name.endswith("world_size") else 0


class Stub(ModuleType):
    """A package whose names are mocks; a decorator of it changes nothing."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Parallel() if name == "mpu" else (lambda kind: kind) if name == "remote" else MagicMock()


class Stubs(MetaPathFinder, Loader):
    """Finds the packages of `STUBBED`."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in STUBBED else None

    def create_module(self, spec: ModuleSpec) -> Stub:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


class Processor:
    """Makes the tokens of `two_images`: a square of 2 x 2 patches each."""

    merge_size = 2

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        grid = torch.tensor([[1, 2, 8], [1, 2, 4]][: len(images)])
        patches = int(grid.prod(dim=1).sum())
        return {"pixel_values": torch.arange(patches * 3).reshape(patches, 3), "image_grid_thw": grid}


def main() -> None:
    sys.meta_path.insert(0, Stubs())
    from slime.backends.megatron_utils.data import DataIterator, get_batch
    from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
    from slime.ray.rollout import RolloutManager
    from slime.utils import accelerator
    from slime.utils.types import Sample

    options: dict[str, Any] = {"decode": str, "temperature": 1.0, "logprobs": "as-recorded", "processor": Processor()}
    ledgers = [two_images(), seen(([1, 2], [], 2)), two_images(stray=0), seen(([1], [], 3), stray=0), two_images()]
    samples = []
    for index, ledger in enumerate(ledgers):
        ledger.annotate("reward", index)
        for one in fan_out(Sample(index=index, prompt="?"), ledger, **options):
            samples.append(complete_aborted(one))
            one._validate_response_metadata_lengths()
    assert [one.status.name for one in samples] == ["COMPLETED", "COMPLETED", "ABORTED", "ABORTED", "COMPLETED"]
    args = SimpleNamespace(reward_key=None, advantage_estimator="grpo", rewards_normalization=False)
    itself = SimpleNamespace(
        args=args, custom_convert_samples_to_train_data_func=None, custom_reward_post_process_func=None
    )
    itself._post_process_rewards = lambda found: RolloutManager._post_process_rewards(itself, found)
    data = RolloutManager._convert_samples_to_train_data(itself, samples)
    given = data["multimodal_train_inputs"]
    assert [each is not None for each in given] == [True, False, False, False, True]
    assert [sum(mask) > 0 for mask in data["loss_masks"]] == [True, True, False, False, True]
    assert data["raw_reward"] == [0.0, 1.0, 0.0, 0.0, 4.0]
    tensorize_rollout_data_for_training(data)
    data["total_lengths"] = [len(each) for each in data["tokens"]]
    accelerator.device = accelerator.current_device = lambda: torch.device("cpu")
    iterator = DataIterator({key: data[key] for key in _KEYS}, [list(range(len(samples)))])
    batch = get_batch(iterator, list(_KEYS))
    tensors, tokens = batch["multimodal_train_inputs"], batch["tokens"]
    assert set(tensors) == {"pixel_values", "image_grid_thw"}
    assert tensors["image_grid_thw"].tolist() == [[1, 2, 8], [1, 2, 4]] * 2
    assert len(tensors["pixel_values"]) == int(tensors["image_grid_thw"].prod(dim=1).sum())
    of_images = int((tensors["image_grid_thw"].prod(dim=1) // Processor.merge_size**2).sum())
    assert int((tokens == PAD).sum()) == of_images, "each placeholder of the packed sequence has its feature"
    print(f"slime's images: ok, {of_images} placeholders, {len(samples)} samples in one micro-batch")


if __name__ == "__main__":
    main()
