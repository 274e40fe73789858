"""Models of a Hugging Face hub, from its cache on this machine or from the hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from strands_tito.engines.errors import ModelUnavailable
from strands_tito.engines.models.build_cache import Report

TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")
MODEL_FILES = (*TOKENIZER_FILES, "*.json", "*.safetensors")


def has_tokenizer(directory: Path) -> bool:
    """Return whether a snapshot holds a tokenizer."""
    return (directory / "tokenizer_config.json").is_file()


def has_model(directory: Path) -> bool:
    """Return whether a snapshot holds a model: configuration, weights and tokenizer."""
    return (directory / "config.json").is_file() and has_tokenizer(directory) and any(directory.glob("*.safetensors"))


def cached(repo: str, is_enough: Callable[[Path], bool]) -> Path | None:
    """Return the newest snapshot of `org/name` in the hub's cache, or None if it is absent or incomplete."""
    try:
        found = Path(snapshot_download(repo, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return found if is_enough(found) else None


def download(repo: str, patterns: tuple[str, ...], is_enough: Callable[[Path], bool], report: Report) -> Path:
    """Fetch the files of `org/name` that match `patterns`.

    Raises:
        ModelUnavailable: The hub has no such model or cannot be reached, or the model lacks files.
    """
    report(f"fetching {repo} from the model hub")
    try:
        found = Path(snapshot_download(repo, allow_patterns=list(patterns)))
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"The hub has no model {repo!r}, or you have no access to it: log in with `hf auth login`."
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError, RuntimeError) as error:
        detail = next(iter(str(error).splitlines()), "no detail")
        raise ModelUnavailable(
            f"{repo} is not in the Hugging Face cache, and the hub cannot be reached "
            f"({type(error).__name__}: {detail}). {_ALTERNATIVES}"
        ) from error
    if not is_enough(found):  # offline, an incomplete snapshot of the cache is returned
        missing = "configuration or weights (as safetensors)" if has_tokenizer(found) else "tokenizer"
        raise ModelUnavailable(f"{repo} has no {missing}, neither on the hub nor in its cache. {_ALTERNATIVES}")
    return found


_ALTERNATIVES = "Give the path of a directory that holds the model, or the name of a built-in model."
