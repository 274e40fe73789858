"""Packed batches, which `batch` defines."""

from strands_tito.export.batch import PackedBatch, Placed, packed

__all__ = ["PackedBatch", "Placed", "packed"]
