"""tinker-cookbook: the proxy of its capture, before the scripted engine in the place of the Tinker service."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import tinker
from aiohttp import web
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from transformers import AutoTokenizer

from tito_conformance.gateway.child import in_loop, request, row

FACTS = {
    "name": "tinker-cookbook",
    "package": "tinker-cookbook",
    "pip": ["--no-deps tinker-cookbook", "tinker torch==2.13.0 transformers aiohttp chz blobfile pillow numpy"],
    "python": "3.11 and later",
    "speaks": ["chat", "messages"],
    "wires": ["vllm"],
    "token_in": False,
    "aborts": False,
    "note": "renderer `qwen3_instruct`; the engine stands in for the Tinker service, in `SamplingClient.sample`",
}
pool = ThreadPoolExecutor(16)
given: dict[str, Any] = {}
records: list[dict[str, Any]] = []
trajectories: dict[str, int] = {}


class Sink:
    """Keeps the records of the capture."""

    def export(self, found: Any, timeout: float | None = None) -> None:
        """Take records."""
        records.extend(found)


def sampled(prompt: Any, sampling: Any) -> SimpleNamespace:
    """Ask the engine for what the Tinker service would sample."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    params = {name: value for name in names if (value := getattr(sampling, name, None)) is not None}
    stops = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
    params["stop"] = [stop for stop in stops if isinstance(stop, str)]
    params["stop_token_ids"] = [stop for stop in stops if isinstance(stop, int)]
    body = {"token_ids": prompt.to_ints(), "sampling_params": {**params, "logprobs": 0}}
    try:
        [choice] = request(f"{given['engine']}/inference/v1/generate", body)["choices"]
    except RuntimeError as error:
        raise as_tinkers(str(error), len(body["token_ids"])) from error
    logprobs = choice["logprobs"] and [entry["logprob"] for entry in choice["logprobs"]["content"]]
    sequence = SimpleNamespace(tokens=choice["token_ids"], logprobs=logprobs, stop_reason=choice["finish_reason"])
    return SimpleNamespace(sequences=[sequence])


def as_tinkers(message: str, size: int) -> tinker.APIStatusError:
    """Return an engine's error as the Tinker SDK raises it, an overflow in that service's words."""
    if "maximum model length" in message:
        words = f"Prompt length plus max_tokens exceeds the model's context window: {size} prompt tokens."
        answer = httpx.Response(400, request=httpx.Request("POST", given["engine"]))
        return tinker.BadRequestError(words, response=answer, body=None)
    answer = httpx.Response(500, request=httpx.Request("POST", given["engine"]))
    return tinker.InternalServerError(message, response=answer, body=None)


def sample(self: Any, prompt: Any, num_samples: int = 1, sampling_params: Any = None, *_: Any, **__: Any) -> Any:
    """Stand in for `SamplingClient.sample`."""
    return AwaitableConcurrentFuture(pool.submit(sampled, prompt, sampling_params))


async def sample_async(self: Any, *arguments: Any, **options: Any) -> Any:
    """Stand in for `SamplingClient.sample_async`."""
    return await sample(self, *arguments, **options)


async def serve(app: web.Application) -> str:
    """Serve the proxy on a free port, and return its address."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


def start(engine: str, wire: str, tokenizer: str, model: str, variant: str) -> None:
    """Put the engine in the service's place, and start the proxy."""
    tinker.SamplingClient.sample, tinker.SamplingClient.sample_async = sample, sample_async
    from tinker_cookbook.capture.exporter import CaptureExporter
    from tinker_cookbook.capture.instrument import instrument_tinker
    from tinker_cookbook.capture.proxy.app import ProxyDeps, make_app
    from tinker_cookbook.renderers import get_renderer

    given.update(engine=engine, exporter=CaptureExporter(Sink(), flush_interval_sec=0.1))
    instrument_tinker(given["exporter"])
    renderer = get_renderer("qwen3_instruct", AutoTokenizer.from_pretrained(tokenizer))
    client = object.__new__(tinker.SamplingClient)
    given["url"] = in_loop(serve(make_app(ProxyDeps(renderer=renderer, sampling_client=client, model_label=model))))


def session(name: str) -> dict[str, Any]:
    """Return the address of a trajectory, which is a number."""
    trajectories[name] = len(trajectories)
    return {"base_url": f"{given['url']}/r/run/kit/traj/{trajectories[name]}/v1", "api_key": "EMPTY"}


def export(name: str) -> list[dict[str, Any]]:
    """Return a row for each sample of the trajectory's records."""
    given["exporter"].force_flush(5)
    own = [record for record in records if (record.get("scope") or {}).get("traj_idx") == trajectories[name]]
    return [
        row(record["prompt_tokens"], each["tokens"], each["logprobs"])
        for record in own
        for each in record.get("samples") or ()
    ]
