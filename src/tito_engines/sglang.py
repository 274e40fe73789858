"""How SGLang is installed and started on a CPU. Measured with `sglang` 0.5.23.

The wheel imports CUDA-only packages; `sglang_standins/README.md` explains their replacements.
"""

from __future__ import annotations

import tempfile
import uuid
from importlib.resources import files
from pathlib import Path

from tito_engines.spec import TORCHVISION_STANDIN, EngineSpec, Launch

_LOCKS = {minor: f"py{minor.replace('.', '')}.txt" for minor in ("3.11", "3.12", "3.13")}

ENV = {
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def command(launch: Launch) -> list[str]:
    """Return the server's command line. Without `--sleep-on-idle` an idle server uses a whole core.

    With `--mm-preprocess-cache-size-mb`, every family of models keeps a request's token ids; without it some decode
    them to text and encode that again where a request has images.
    """
    images = ["--mm-preprocess-cache-size-mb", "64"] if launch.images else []
    return [
        str(launch.python), "-m", "sglang.launch_server",
        "--model-path", str(launch.model_path),
        "--served-model-name", launch.model_name,
        "--host", launch.host,
        "--port", str(launch.port),
        "--device", "cpu",
        "--attention-backend", "torch_native",
        "--sampling-backend", "pytorch",
        "--disable-cuda-graph",
        "--disable-overlap-schedule",
        "--dtype", "float32",
        "--max-total-tokens", "20000",
        "--max-running-requests", "16",
        "--sleep-on-idle",
        *images,
        *launch.server_args,
    ]  # fmt: skip


def env(launch: Launch) -> dict[str, str]:
    """Return the environment. As in vLLM, torch's rendezvous uses a new file per start.

    The default is a TCP store, which torch always binds to all interfaces. `launch.dev_mode` has no effect, as SGLang
    always enables its pause and weight endpoints. Its cache of image features is off: it keeps the features of the old
    weights when weights are loaded.
    """
    store = Path(tempfile.gettempdir(), f"tito-sglang-{uuid.uuid4().hex}")
    images = {"SGLANG_VLM_CACHE_SIZE_MB": "0"} if launch.images else {}
    return {**ENV, **images, "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": store.as_uri()}


SPEC = EngineSpec(
    name="sglang",
    title="SGLang 0.5.23",
    locks={
        minor: (files("tito_engines") / "locks" / "sglang" / name).read_text(encoding="utf-8")
        for minor, name in _LOCKS.items()
    },
    command=command,
    env=env,
    import_check="import sglang.launch_server, sglang.srt.entrypoints.http_server",
    check_env=ENV,
    standins=(TORCHVISION_STANDIN, Path(str(files("tito_engines") / "sglang_standins"))),
    standin_startup="tito_torchvision_ops",
    processed_logprobs=True,
    sampling_names={"seed": "sampling_seed"},  # trainers start it without a tokenizer, which the others need
    grace_s=2.0,  # it checks for SIGTERM only every 5 s, and has nothing to save
)
