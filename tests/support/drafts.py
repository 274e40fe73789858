"""Random drafts with readable token bands: 100s are prompts, 200s are answers."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tito_core.ledger import (
    CallRecord,
    Columns,
    Draft,
    EngineRecord,
    Finish,
    Provenance,
    Sampling,
    Semantics,
    Server,
    VersionSpan,
)


def engine_record(length: int, cut: int | None = None, backend: str = "scripted") -> EngineRecord:
    if cut is None or not 0 < cut < length:
        versions = (VersionSpan(0, length, None),)
    else:
        versions = (VersionSpan(0, cut, "v1"), VersionSpan(cut, length, "v2"))
    return EngineRecord(Server(backend, "m", Semantics(False, 1.0, False, "test")), "request", 0.25, None, versions)


def make_draft(parent: int | None, path_length: int, prompt: list[int], output: list[int], **changes: object) -> Draft:
    """Make a draft; `changes` are its fields, or any of the four columns."""
    columns = {
        "prompt_ids": np.array(prompt, np.int32),
        "prompt_provenance": np.zeros(len(prompt), np.uint8),
        "output_ids": np.array(output, np.int32),
        "logprobs": -np.arange(1, len(output) + 1, dtype=np.float32),
    }
    columns |= {name: changes.pop(name) for name in list(columns) if name in changes}
    fields: dict[str, object] = {
        "parent": parent,
        "columns": Columns.pack(**columns),
        "constrained": False,
        "prompt_length": path_length + len(prompt),
        "finish": Finish.STOP,
        "stop": output[-1] if output else None,
        "fingerprint": bytes([len(prompt) % 256, path_length % 256]),
        "sampling": Sampling({"temperature": 1.0}),
        "max_new_tokens": 64,
        "calls": (),
        "engine": engine_record(len(output)),
    }
    return Draft(**{**fields, **changes})  # type: ignore[arg-type]


@st.composite
def drafts(draw: st.DrawFn, parent: int | None, path_length: int) -> Draft:
    prompt = draw(st.lists(st.integers(100, 199), min_size=0 if parent is not None else 1, max_size=6))
    output = draw(st.lists(st.integers(200, 299), min_size=1, max_size=6))
    provenance = draw(
        st.lists(
            st.sampled_from([Provenance.PROMPT, Provenance.SCAFFOLD, Provenance.INSERTED]),
            min_size=len(prompt),
            max_size=len(prompt),
        )
    )
    logprobs = draw(
        st.lists(st.floats(-50, 0, width=32), min_size=len(output), max_size=len(output)).map(
            lambda values: np.array(values, np.float32)
        )
    )
    call = CallRecord("look", draw(st.sampled_from(["ok", "malformed"])), 0, 1, "why")
    return make_draft(
        parent,
        path_length,
        prompt,
        output,
        prompt_provenance=np.array(provenance, np.uint8),
        logprobs=logprobs,
        constrained=draw(st.booleans()),
        finish=draw(st.sampled_from(list(Finish))),
        stop=draw(st.sampled_from([None, 2, "END"])),
        fingerprint=draw(st.binary(min_size=1, max_size=2)),
        calls=(call,) if draw(st.booleans()) else (),
        engine=engine_record(len(output), draw(st.integers(0, 6))),
    )
