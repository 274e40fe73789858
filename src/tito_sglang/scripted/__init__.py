"""A scripted SGLang server: the HTTP surface of SGLang 0.5.23, as recorded from a real one.

It judges the backend, and so imports the frame of scripted servers alone: `tito_core.testing`.
"""
