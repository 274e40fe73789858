"""Models of a Hugging Face hub: its cache on this machine first, then the hub itself where it can be reached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from strands_tito.engines.errors import ModelUnavailable
from strands_tito.engines.models.once import Say

TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")
MODEL_FILES = (*TOKENIZER_FILES, "*.json", "*.safetensors")


def has_tokenizer(directory: Path) -> bool:
    """Whether a snapshot holds enough to load a tokenizer."""
    return (directory / "tokenizer_config.json").is_file()


def has_model(directory: Path) -> bool:
    """Whether a snapshot holds a whole model: its configuration, weights and tokenizer."""
    return (directory / "config.json").is_file() and has_tokenizer(directory) and any(directory.glob("*.safetensors"))


def cached(repo: str, is_enough: Callable[[Path], bool]) -> Path | None:
    """The newest snapshot of `org/name` in the hub's cache, or None where it is absent or lacks what is needed."""
    try:
        found = Path(snapshot_download(repo, local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return found if is_enough(found) else None


def download(repo: str, patterns: tuple[str, ...], is_enough: Callable[[Path], bool], say: Say) -> Path:
    """Fetch the files of `org/name` that match; raises ModelUnavailable with the reason where it cannot be done."""
    say(f"asking the model hub for {repo}")
    try:
        found = Path(snapshot_download(repo, allow_patterns=list(patterns)))
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(f"the hub has no model {repo!r}, or not for you; log in with `hf auth login`") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError, RuntimeError) as error:
        detail = next(iter(str(error).splitlines()), "no detail")
        raise ModelUnavailable(
            f"{repo} is not in the Hugging Face cache and the hub cannot be reached "
            f"({type(error).__name__}: {detail}). {_ELSE}"
        ) from error
    if not is_enough(found):  # out of reach of the hub, what the cache holds comes back, be it a part
        lacking = "configuration or the weights (as safetensors)" if has_tokenizer(found) else "tokenizer"
        raise ModelUnavailable(f"what the hub and its cache have of {repo} lacks the {lacking}. {_ELSE}")
    return found


_ELSE = "Give the path of a directory that holds the model, or one of the names that are built here."
