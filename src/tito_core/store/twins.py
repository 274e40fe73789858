"""The ledger's classes as msgspec reads them fastest: structs with the same fields and views, in half the time."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from tito_core.ledger.columns import Columns, ColumnViews
from tito_core.ledger.turn import Draft, DraftViews, EngineRecord, EngineViews

_TWINS: dict[type, type] = {}
ORIGINALS: dict[type, type] = {}
"""The dataclass that each twin stands for."""


def _twin(kind: type, views: type) -> type:
    """Make a frozen struct with a dataclass's fields, in which the twins made before stand for their originals."""
    hints = get_type_hints(kind)
    twin = msgspec.defstruct(
        f"Stored{kind.__name__}",
        [(field.name, _TWINS.get(hints[field.name], hints[field.name]), _default(field)) for field in fields(kind)],
        bases=(msgspec.Struct, views),
        module=__name__,
        frozen=True,
        eq=False,
        forbid_unknown_fields=True,  # what a damaged name, or a newer version, says must not be dropped in silence
    )
    _TWINS[kind], ORIGINALS[twin] = twin, kind
    return twin


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return (
        msgspec.NODEFAULT if field.default_factory is MISSING else msgspec.field(default_factory=field.default_factory)
    )


if TYPE_CHECKING:  # to who reads them, they are what they stand for
    StoredColumns, StoredEngineRecord, StoredDraft = Columns, EngineRecord, Draft
else:
    StoredColumns = _twin(Columns, ColumnViews)
    StoredEngineRecord = _twin(EngineRecord, EngineViews)
    StoredDraft = _twin(Draft, DraftViews)
