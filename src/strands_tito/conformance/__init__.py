"""The conformance suite: what a server must do for token-exact rollouts, asked of the server itself.

    tito conformance --backend vllm --base-url http://localhost:8000 --tokenizer Qwen/Qwen3-4B
    pytest --pyargs strands_tito.conformance --tito-backend=vllm --tito-base-url=... --tito-tokenizer=...

An agent drawn at random plays on the server through `TITOModel`; every step is held to the laws, to an oracle that
reads the wire by itself, to transformers' own rendering of the chat template, and to the server's own scores.
"""
