"""A TLS server context with an untrusted certificate: for 127.0.0.1, self-signed, valid until 2126."""

from __future__ import annotations

import ssl
from pathlib import Path

CERTIFICATE_NAME = "ce275665.0"
"""Name of the certificate in a folder of authorities, as OpenSSL looks it up: the hash of its subject."""
_PEM = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgWyMC8ZfNkcstS15o
KRAaIAVAhsIky01P5dmwtba+fsuhRANCAAR1vcqjHLDyoCqGX2sHchdZHBPWuuTf
+zt7pdzpK3JQl2ypitXki+36Qhv1vDI3/mlwO6Hex+EavL7hhiWYiVk6
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUVzrtnHJ1CXi3Fu1bxUyNg/uKWNkwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMzA3MjQ0MloYDzIxMjYxMDMw
MDcyNDQyWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAR1vcqjHLDyoCqGX2sHchdZHBPWuuTf+zt7pdzpK3JQl2ypitXki+36
Qhv1vDI3/mlwO6Hex+EavL7hhiWYiVk6o28wbTAdBgNVHQ4EFgQUgl+017oeJbOp
hENZmm6XT8QtjFYwHwYDVR0jBBgwFoAUgl+017oeJbOphENZmm6XT8QtjFYwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIgIRijl0WFVsQEY8WlpHluNGjM8TK1mrsfZdbojm+MJuMCIQCN
ddrvkrqTmS99v3rGLJA2DyRjOFQ1a8JMcbZ/Gx0BFA==
-----END CERTIFICATE-----
"""


def server_context(folder: Path) -> ssl.SSLContext:
    """Return a server's context; the certificate is written to `folder`, as OpenSSL reads only files."""
    path = folder / "server.pem"
    path.write_text(_PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context
