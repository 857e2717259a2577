"""What went through the TCP connections of this process, by Linux's own count."""

import os
import socket
import stat
import struct
from contextlib import suppress

# Where these fields of `struct tcp_info` are: include/uapi/linux/tcp.h of Linux. New
# ones are only ever added at the end; the ones read here are there since Linux 4.19.
RECEIVED, SENT, SENT_AGAIN = 128, 200, 208


def wire_bytes() -> int | None:
    """Return the bytes that this process has sent and received by TCP until now.

    What was lost and sent again counts once; the headers of packets do not count.
    None if the system does not tell.
    """
    if not (hasattr(socket, "TCP_INFO") and os.path.isdir("/proc/self/fd")):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        # It may be closed by now, or be a socket of another kind.
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                total += tcp_bytes(int(name))
    return total


def tcp_bytes(file_descriptor: int) -> int:
    """Return the bytes sent and received through one connection.

    Raises:
        OSError: this is no TCP connection, or the system does not count them.
    """
    # A copy, so that closing it does not close the connection.
    with socket.socket(fileno=os.dup(file_descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < SENT_AGAIN + 8:
        raise OSError("this Linux does not count the bytes sent")
    sent, again, received = (
        struct.unpack_from("=Q", info, place)[0]
        for place in (SENT, SENT_AGAIN, RECEIVED)
    )
    return sent - again + received
