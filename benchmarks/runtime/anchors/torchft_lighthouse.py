"""torchft's lighthouse, as `torchft_lighthouse` starts it; writes its address to a file."""

from __future__ import annotations

import os
import time

from torchft.coordination import LighthouseServer

from benchmarks.runtime.anchors.model import FOLDER


def main() -> None:
    """Serve until this process is ended."""
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=2,
        join_timeout_ms=int(os.environ["JOIN_TIMEOUT_MS"]),
        quorum_tick_ms=100,
        heartbeat_timeout_ms=5000,
    )
    writing = FOLDER / "address.writing"
    writing.write_text(server.address())
    writing.rename(FOLDER / "address")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
