"""What TCP sent for this process: the kernel's own count of each open connection, in whatever library it is.

Process groups of gloo connect in C++, where nothing of Python sees a message; the kernel counts all the same.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys

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
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # Named as they mostly are, or Python would ask the kernel three times what it is; detached, not closed.
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, int(name))
            try:
                told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            finally:
                connection.detach()
        except OSError:  # not of TCP, or closed meanwhile by another thread
            continue
        if len(told) < _BYTES_SENT + 16:
            return None
        sent, repeated = struct.unpack_from("=QQ", told, _BYTES_SENT)
        total += sent - repeated
    return total
