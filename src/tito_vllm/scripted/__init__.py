"""A scripted vLLM server: the HTTP surface of vLLM 0.32.0, as recorded from a real one.

It judges the backend, and so imports the frame of scripted servers alone: `tito_core.testing`.
"""
