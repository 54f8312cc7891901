"""A server over the fake engine, in a process with few descriptors; says its port. For test_listening.py."""

from __future__ import annotations

import os
import resource
import socket
import sys

from laconic.infer.server import ByteTokenizer, ServerSettings, create_app
from laconic.infer.server.listening import ConnectionLimits, serve_http
from tests.infer.serving import FakeEngine


def main() -> None:
    """Serve with LOG, HEAD_SECONDS and MAX_CONNECTIONS, of which 0 is the default, of the command line."""
    os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    engine = FakeEngine(step_seconds=0.01)
    listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(listening.getsockname()[1], flush=True)
    limits = ConnectionLimits(head_seconds=int(sys.argv[2]), max_connections=int(sys.argv[3]) or None)
    try:
        serve_http(create_app(engine, ByteTokenizer(), ServerSettings("fake")), listening, limits, 1)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
