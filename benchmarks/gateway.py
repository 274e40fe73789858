"""CPU of one turn in the gateway's process, beside `TITOModel` in the same process, and beside a bare reverse proxy.

    python benchmarks/gateway.py [--json] [--quick | --smallest]

A harness in another process sends the whole conversation with every request, as chat completions, and receives 300
sampled tokens with a tool call, from one canned server. The proxy forwards the harness's bytes to that server, and does
nothing else. Keys, each by context (2k, 32k, 128k), in milliseconds, medians: `model_ms`, `gateway_ms`,
`proxy_ms`; `more_ms` is the gateway's less the model's.
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
from typing import Any

from bench import Client, canned_server, options, report
from rich.table import Table

sys.path.append(str(__file__).rpartition("/")[0] + "/clients")
from conversation import CONTEXTS, SYSTEM, TOOLS, TURNS

ROUNDS = ({"2k": 6, "32k": 4, "128k": 3}, {"2k": 3, "32k": 2, "128k": 1}, {"2k": 1, "128k": 1})
"""Rollouts of each kind and context, with ten measured turns each, by size."""
FUNCTIONS = [
    {"type": "function", "function": {"name": tool["name"], "parameters": tool["inputSchema"]["json"]}}
    for tool in TOOLS
]


def rollout(process: Client, port: int, session: str, tokens: int) -> list[float]:
    """Play a conversation as a harness does, and return the CPU milliseconds of the other process for each turn."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "word " * tokens}]
    connection, spent = http.client.HTTPConnection("127.0.0.1", port, timeout=120), []
    for _ in range(TURNS + 1):
        body = json.dumps({"model": "canned", "messages": messages, "tools": FUNCTIONS}).encode()
        began = process.ask(what="cpu")
        connection.request(
            "POST", f"/sessions/{session}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        answer = json.loads(connection.getresponse().read())
        spent.append(process.ask(what="cpu") - began)
        message: Any = {"role": "assistant", "content": "So."}
        if "choices" in answer:
            message = answer["choices"][0]["message"]
        messages.append(message)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "It is 17."}
            for call in message.get("tool_calls") or ()
        ]
        messages += results or [{"role": "user", "content": "And then?"}]
    connection.close()
    return spent[1:]


def main() -> None:
    """Measure and print."""
    arguments = options(__doc__).parse_args()
    rounds = ROUNDS[arguments.size]
    samples: dict[str, dict[str, list[float]]] = {
        name: {at: [] for at in rounds} for name in ("model", "gateway", "proxy")
    }
    with canned_server() as port:
        process = Client(sys.executable, "gateway_server.py", str(port))
        gateway, proxy = process.ask(what="ports")
        rollout(process, gateway, "warm-up", 2_000)
        for at, count in rounds.items():
            for number in range(count):
                samples["model"][at] += process.ask(what="model", context=at)
                samples["gateway"][at] += rollout(process, gateway, f"{at}-{number}", CONTEXTS[at])
                samples["proxy"][at] += rollout(process, proxy, "x", CONTEXTS[at])
        process.close()
    medians = {name: {at: statistics.median(values) for at, values in of.items()} for name, of in samples.items()}
    medians["more"] = {at: medians["gateway"][at] - medians["model"][at] for at in rounds}
    table = Table("", *rounds, title="CPU milliseconds of one turn, median")
    shown = {"model": "TITOModel", "gateway": "gateway", "proxy": "bare proxy", "more": "gateway less TITOModel"}
    for name, title in shown.items():
        table.add_row(title, *(f"{medians[name][at]:.2f}" for at in rounds))
    report(arguments, {f"{name}_ms": of for name, of in medians.items()}, table)


if __name__ == "__main__":
    main()
