"""What TCP sent for this process: the kernel's own count of each open connection, in whatever library it is.

Process groups of gloo connect in C++, where nothing of Python sees a message; the kernel counts all the same.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

__all__ = ["tcp_sent_nbytes"]

_BYTES_SENT = 200
"""Offset of tcpi_bytes_sent and tcpi_bytes_retrans, two of 8 bytes, in the tcp_info of Linux 4.19 and later."""


def tcp_sent_nbytes() -> int | None:
    """Bytes that the open TCP connections of this process have sent so far, loopback included, repetitions not.

    Returns:
        The sum; None where the kernel does not tell (it is not Linux, or older than 4.19).
    """
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # closed meanwhile, by another thread
            continue
        if len(told) < _BYTES_SENT + 16:
            return None
        sent, repeated = struct.unpack_from("=QQ", told, _BYTES_SENT)
        total += sent - repeated
    return total
