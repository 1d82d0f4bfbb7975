"""A prepared process that forks workers: torch imported, an optimizer built and stepped, numpy loaded.

Importing torch takes over a second and the first optimizer nearly another; a fork of this process has both
behind it. It never starts a thread pool (forked pools hang) nor touches a device.

It speaks JSON lines over the socket it is given: {"spawn": ...} in, {"started": ...}, {"exited": ...} out.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any


def prepare() -> None:
    """Import and build once what every worker needs."""
    import numpy as np
    import torch

    import swell.train.checkpoint
    import swell.train.job
    import swell.train.pool

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    with _hidden_devices():
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            optimizer = kind(model.parameters(), lr=0.0)
            swell.train.job.Job(model, optimizer)
            if torch.version.cuda is None and torch.version.hip is None:
                model(torch.zeros(1, 2)).sum().backward()
            else:  # backward would start a thread for every device, which no fork survives
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
    np.random.default_rng(0).permutation(2)


@contextlib.contextmanager
def _hidden_devices() -> Iterator[None]:
    """Optimizers ask whether there is a GPU, and the mere question initialises CUDA: answer for it."""
    import torch

    asked = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = asked


def child(order: dict[str, Any]) -> int:
    """Become the worker that `order` describes; returns its exit code."""
    import numpy as np
    import torch

    from swell.train import bootstrap

    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(int(order["threads"]))
    random.seed()
    np.random.seed()  # noqa: NPY002 - every fork would draw the same numbers otherwise
    return bootstrap.run(order["script"], order["arguments"])


class Zygote:
    """The fork server's loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._children: dict[int, str] = {}
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)

    def run(self) -> None:
        """Fork and reap until the launcher closes the socket."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w)
        buffer = b""
        while True:
            watch: list[Any] = [self._sock, self._wake_r]
            readable, _, _ = select.select(watch, [], [], 1.0)
            if self._wake_r in readable:
                os.read(self._wake_r, 4096)
            self._reap()
            if self._sock in readable:
                data = self._sock.recv(1 << 16)
                if not data:
                    return
                buffer += data
                while b"\n" in buffer:
                    line, buffer = buffer.split(b"\n", 1)
                    self._spawn(json.loads(line))

    def _spawn(self, order: dict[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self._sock.close()
                os.close(self._wake_r)
                os.close(self._wake_w)
                code = child(order)
            finally:
                from swell.train import bootstrap

                bootstrap.leave(code)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._children[pid] = order["spawn"]
        self._tell({"started": order["spawn"], "pid": pid})

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            self._tell({"exited": self._children.pop(pid), "pid": pid, "code": code})

    def _tell(self, message: dict[str, Any]) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")


def main() -> None:
    """Serve on the socket whose descriptor is given."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    prepare()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Zygote(sock).run()


if __name__ == "__main__":
    main()
