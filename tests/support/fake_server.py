"""The fake engine's server: the standard library's HTTP server, with the process habits of real engines.

Usage: fake_server.py PORT MODEL_NAME [--fail TEXT] [--deaf] [--stubborn]. It answers /health (with 503 if `--deaf`),
and starts a child in a new session and an orphaned grandchild; with `--stubborn` all of them ignore SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

CHILD = """
import signal, time
{ignore}
time.sleep(600)
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(404 if self.path != "/health" else 503 if "--deaf" in sys.argv else 200)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        print("warmed up with", json.loads(body), flush=True)
        self._answer(200)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    if "--fail" in sys.argv:
        print("Traceback (most recent call last):\n  in the fake", flush=True)
        raise SystemExit(sys.argv[sys.argv.index("--fail") + 1])
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if "--stubborn" in sys.argv else ""
    if ignore:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    script = CHILD.format(ignore=ignore)
    subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan, script], check=True)
    print("serving", sys.argv[2], "in", os.getcwd(), flush=True)
    time.sleep(0.3)
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
