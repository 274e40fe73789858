"""Hugging Face datasets: samples as a `datasets.Dataset`, with the columns of `parquet`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from strands_tito.export.parquet import samples_in, table_of
from strands_tito.export.sample import TrainingSample
from strands_tito.export.trainer import import_optional

if TYPE_CHECKING:
    from datasets import Dataset


def dataset_of(samples: Iterable[TrainingSample], **options: Any) -> Dataset:
    """Return samples as a `datasets.Dataset` in memory, one row each. `datasets` can also read `write_parquet`'s files.

    Args:
        samples: Samples of any number of rollouts.
        **options: For `datasets.Dataset`, such as `split`.

    Raises:
        MissingPackageError: datasets is not installed.
    """
    datasets = import_optional("datasets", "datasets")
    return cast("Dataset", datasets.Dataset(table_of(samples), **options))


def samples_of_dataset(dataset: Dataset) -> Iterator[TrainingSample]:
    """Yield the samples of a dataset, equal to those that it was made from; other columns are ignored.

    Raises:
        SamplesSchemaError: The rows are not samples.
    """
    for chunk in dataset.with_format("arrow").iter(batch_size=64):
        yield from samples_in(cast(Any, chunk))
