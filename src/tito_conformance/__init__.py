"""The conformance suite: tests whether a server gives token-exact rollouts.

    tito conformance --backend vllm --base-url http://localhost:8000 --tokenizer Qwen/Qwen3-4B
    pytest --pyargs tito_conformance --tito-backend=vllm --tito-base-url=... --tito-tokenizer=...

Simulated agents play random conversations on the server through `TITOModel`. Every step is checked against the laws, an
oracle that reads the wire itself, transformers' own rendering of the chat template, and the server's own scores.
"""
