"""Rollouts as a Hugging Face dataset, with the columns of the Parquet schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from strands_tito.export.missing import imported
from strands_tito.export.parquet import samples_in, schema, table_of
from strands_tito.export.sample import TrainingSample

if TYPE_CHECKING:
    from datasets import Dataset


def dataset_of(samples: Iterable[TrainingSample], **options: Any) -> Dataset:
    """Give samples as a `datasets.Dataset` in memory, a row each; `datasets` reads what `write_parquet` wrote, too.

    Args:
        samples: Samples of any number of rollouts.
        **options: For `datasets.Dataset`, such as `split`.

    Raises:
        MissingPackageError: datasets is not installed.
    """
    datasets = imported("datasets", "datasets")
    return cast("Dataset", datasets.Dataset(table_of(samples), **options))


def samples_of_dataset(dataset: Dataset) -> Iterator[TrainingSample]:
    """Return the samples of a dataset back, equal to those that it was made of."""
    for chunk in dataset.with_format("arrow").iter(batch_size=64):
        yield from samples_in(cast(Any, chunk).cast(schema()))
