"""What encryption between hosts costs: CPU time of sending and receiving 40 MB, plain, by TLS and in records.

    python -m benchmarks.runtime.sealed

Both ends are threads of this process, so the figure is what one worker pays that sends and receives as much.
"""

from __future__ import annotations

import json
import socket
import threading
import time

from swell.train.agent.records import fresh_token, use_records
from swell.train.agent.sealed import SealedSocket, Stream

SIZE = 40_000_000
REPEATS = 5
WAYS = ("plain", "tls", "records")


def pair(way: str) -> tuple[Stream, Stream]:
    """Two connected ends on the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    if way == "plain":
        return near, far
    ends: list[SealedSocket] = []
    accepting = threading.Thread(
        target=lambda: ends.append(SealedSocket(far, "s", server=True, timeout_s=60))
    )
    accepting.start()
    made = SealedSocket(near, "s", server=False, timeout_s=60)
    accepting.join()
    if way == "tls":
        return made, ends[0]
    tokens = fresh_token(made), fresh_token(ends[0])
    return use_records(made, *tokens), use_records(ends[0], *reversed(tokens))


def cpu_ms(way: str) -> float:
    """CPU time to send and to receive `SIZE` bytes."""
    near, far = pair(way)
    near.settimeout(None)
    far.settimeout(None)
    data, sink = bytes(SIZE), memoryview(bytearray(SIZE))

    def receive() -> None:
        count = 0
        while count < SIZE:
            count += far.recv_into(sink[count:])

    found = []
    for _ in range(REPEATS):
        receiving = threading.Thread(target=receive)
        began_s = time.process_time()
        receiving.start()
        near.sendall(data)
        receiving.join()
        found.append((time.process_time() - began_s) * 1e3)
    near.close()
    far.close()
    return round(min(found), 1)


if __name__ == "__main__":
    print(json.dumps({f"{way}_cpu_ms": cpu_ms(way) for way in WAYS}))
