"""One TCP transfer of known size, to calibrate a link: a program for two hosts that needs only the standard library."""

from __future__ import annotations

import socket
import sys
import time

_PORT = 7777


def receive(address: str, num_bytes: int) -> None:
    """Receive `num_bytes` from one connection and acknowledge them with one byte.

    Raises:
        ConnectionError: the sender closes the connection earlier.
    """
    with socket.create_server((address, _PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            left = num_bytes
            while left:
                received = len(connection.recv(min(left, 1 << 20)))
                if not received:
                    raise ConnectionError(f"the sender left with {left} of {num_bytes} bytes to go")
                left -= received
            connection.sendall(b"x")


def send(address: str, num_bytes: int) -> None:
    """Send `num_bytes` and print the rate in bits per second, up to the receiver's acknowledgement."""
    payload = bytes(min(num_bytes, 1 << 20))
    with socket.create_connection((address, _PORT), timeout=60) as connection:
        started = time.perf_counter()
        left = num_bytes
        while left:
            size = min(left, len(payload))
            connection.sendall(payload[:size])
            left -= size
        connection.recv(1)
        print(num_bytes * 8 / (time.perf_counter() - started))


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
