"""Budgets of the property tests: small under `make test`, raised for all of them by TITO_EXAMPLES (`make prove`)."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import Phase, settings

EXAMPLES = int(os.environ.get("TITO_EXAMPLES", "0"))
FEW = 12
"""Maximum examples of a property without TITO_EXAMPLES: what mutants live through these is rarely found by more."""

# Tests are never timed: a slow machine is not a defect. Benchmarks hold speed.
settings.register_profile("tito", deadline=None, max_examples=EXAMPLES or FEW)
# A mutant is killed by the first example that fails; the smallest one is not needed.
settings.register_profile(
    "mutants",
    settings.get_profile("tito"),
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
)
# A row of tools/matrix.py asks whether other versions of packages work, which few examples tell.
settings.register_profile("matrix", settings.get_profile("tito"), derandomize=True, database=None)
PROFILE = os.environ.get("TITO_PROFILE", "tito")
settings.load_profile(PROFILE)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Number the cases of each test for mutmut, which asks for tests by id.

    pytest does not find an id with a backslash again, and mutmut takes its complaint for a killed mutant.
    """
    if PROFILE != "mutants":
        return
    parametrize = metafunc.parametrize

    def numbered(argnames: Any, argvalues: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        values = [value._replace(id=None) if isinstance(value, ParameterSet) else value for value in argvalues]
        given = inspect.signature(parametrize).bind(argnames, values, *args, **kwargs)
        given.arguments["ids"] = [str(number) for number in range(len(values))]
        parametrize(*given.args, **given.kwargs)

    metafunc.parametrize = numbered  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        test = getattr(item, "obj", None)
        held_by = getattr(item, "cls", None) if hasattr(getattr(item, "cls", None), "settings") else test
        name = "settings" if held_by is getattr(item, "cls", None) else "_hypothesis_internal_use_settings"
        if isinstance(own := getattr(held_by, name, None), settings):
            wanted = max(own.max_examples, EXAMPLES) if EXAMPLES else min(own.max_examples, FEW)
            raised = settings(own, max_examples=wanted)
            setattr(getattr(held_by, "__func__", held_by), name, raised)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import and collect without garbage collections, which find nothing there and take a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def fresh_heap() -> Iterator[None]:
    """Exclude what earlier modules left, such as tokenizers in caches, from garbage collection.

    A full collection then takes milliseconds instead of a second, and finds all garbage that this module's tests make.
    """
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the checks of raw responses, for backends that return a `TokenResponse`."""

    async def generate(backend: Any, request: Any, on_chunk: Any = None) -> Any:
        return await (backend.generate(request) if on_chunk is None else backend.generate(request, on_chunk))

    monkeypatch.setattr("tito_core.backend.resume.generate", generate)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with SmolLM2's tokenizer."""
    from support.scripted import tokenizer  # imports transformers, which few tests of a folder may need

    path = tmp_path_factory.mktemp("of") / "tokenizer"
    tokenizer().save_pretrained(path)
    return str(path)
