"""Judges a gateway: an HTTP address that speaks OpenAI's chat completions and records token ids for training.

A gateway stands between a harness and an engine. The kit plays both: a harness with a plain HTTP client, and a scripted
engine that keeps its own log. After each scenario it compares what the gateway exports with that log. It shares no code
with any gateway.

    engine.py    the scripted engine: answers by a mark in the prompt, in ids that encoding their text does not give
    session.py   the harness: one session, its requests and answers
    audit.py     exported rows against the engine's log
    checks.py    the checks
    adapter.py   how a gateway is started, addressed and exported: a child process, or an address
    child.py     the program of that child process, run by the gateway's own Python
    adapters/    one file a gateway
"""
