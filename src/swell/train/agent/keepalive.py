"""How a cut link is noticed: the system itself asks the other side for a sign of life.

A connection over a link that is cut looks like one over which nothing is said. The probes of TCP are answered
by the other host's system, however busy or frozen the process is, so silence means that the link or the host
is gone and nothing else. Then reading the connection fails.
"""

from __future__ import annotations

import contextlib
import socket

from swell.train.agent.sealed import Stream


def keep_alive(sock: Stream, *, every_s: int, probes: int, unacknowledged_s: float = 0.0) -> None:
    """Have the connection fail `every_s * (probes + 1)` seconds after the last sign of life.

    With `unacknowledged_s` it also fails if what was sent is not acknowledged, or not taken, for so long.
    Then the other side must always read: a process that computes for that long would count as gone.
    """
    options = {"TCP_KEEPIDLE": every_s, "TCP_KEEPINTVL": every_s, "TCP_KEEPCNT": probes}
    if unacknowledged_s:
        options["TCP_USER_TIMEOUT"] = int(unacknowledged_s * 1e3)
    with contextlib.suppress(OSError):  # not a TCP socket
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
