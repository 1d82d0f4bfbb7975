"""A prepared process that forks workers: torch imported, an optimizer built and stepped, numpy loaded.

Importing torch takes over a second and building the first optimizer nearly another; a fork of this process
does not have to do either. The zygote never starts a thread pool (forked pools hang) and uses no device.

It speaks JSON lines over the socket it is given: {"spawn": ...} in, {"started": ...}, {"exited": ...} out.
Several jobs can share a zygote that listens on a path (`--listen`): it lives until its standard input ends,
and it ends the workers of a client that closes its connection.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

from swell.train.agent import children
from swell.train.agent.polling import readable


def prepare() -> None:
    """Import and build what every worker needs."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded
    import numpy as np
    import torch

    import swell.train.data.samples
    import swell.train.job
    import swell.train.state.checkpoint

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
    with _hidden_devices():
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            optimizer = kind(model.parameters(), lr=0.0)
            swell.train.job.Job(model, optimizer)
            if torch.version.cuda is None and torch.version.hip is None:
                model(torch.zeros(1, 2)).sum().backward()
            else:  # backward would start a thread per device, and a fork would hang
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
    np.random.default_rng(0).permutation(2)
    # The collector of a worker need not go through what was imported here: each look at an object writes to
    # it, and a fork then copies its memory, which takes a fifth of a second in the middle of some step.
    gc.collect()
    gc.freeze()
    children.now_prepared()


@contextlib.contextmanager
def _hidden_devices() -> Iterator[None]:
    """Hide GPUs from optimizers: they check whether there is one, and the check alone initialises CUDA."""
    import torch

    is_available = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = is_available


def child(order: dict[str, Any]) -> int:
    """Become the worker that `order` describes; returns its exit code."""
    import numpy as np
    import torch

    from swell.train.start import bootstrap

    os.environ.update(order["env"])
    for name, value in order.get("visible", {}).items():
        children.show(name, value)
    os.chdir(order["cwd"])
    for folder in (*reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)), order["cwd"]):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
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
    """The fork server's loop: for one launcher, or for all clients that connect to `listener`."""

    def __init__(self, sock: socket.socket | None = None, listener: socket.socket | None = None) -> None:
        self._clients: dict[socket.socket, bytes] = {} if sock is None else {sock: b""}
        self._listener = listener
        self._children: dict[int, tuple[socket.socket, str]] = {}
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)

    def run(self) -> None:
        """Fork and reap until the launcher closes its socket, or standard input ends for one that listens."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w)
        while self._listener is not None or self._clients:
            watch: list[Any] = [self._wake_r, *self._clients]
            if self._listener is not None:
                watch += [self._listener, 0]
            ready = readable(watch, 1.0)
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            self._reap()
            if 0 in ready and not os.read(0, 64):
                return
            if self._listener is not None and self._listener in ready:
                self._clients[self._listener.accept()[0]] = b""
            for sock in [s for s in self._clients if s in ready]:
                self._receive(sock)

    def _receive(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._hung_up(sock)
            return
        *lines, self._clients[sock] = (self._clients[sock] + data).split(b"\n")
        for line in lines:
            self._spawn(json.loads(line), sock)

    def _hung_up(self, sock: socket.socket) -> None:
        """Handle the end of a connection: a listening zygote then ends that client's workers."""
        del self._clients[sock]
        sock.close()
        if self._listener is not None:
            for pid in [pid for pid, (owner, _) in self._children.items() if owner is sock]:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)

    def _spawn(self, order: dict[str, Any], sock: socket.socket) -> None:
        if order.get("sharded"):
            import swell.train.replicas.sharded  # noqa: F401 - it takes torch a second, and once is enough

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
                for open_ in [*self._clients, *([self._listener] if self._listener is not None else [])]:
                    open_.close()
                os.close(self._wake_r)
                os.close(self._wake_w)
                children.set_name(f"swell-{order['spawn']}")
                code = child(order)
            finally:
                from swell.train.start import bootstrap

                bootstrap.leave(code)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._children[pid] = (sock, order["spawn"])
        self._send(sock, {"started": order["spawn"], "pid": pid})

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            sock, name = self._children.pop(pid)
            self._send(sock, {"exited": name, "pid": pid, "code": code})

    def _send(self, sock: socket.socket, message: dict[str, Any]) -> None:
        if sock not in self._clients:
            return
        try:
            sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            if self._listener is None:
                raise


def listen(path: str) -> socket.socket:
    """A socket at `path`, for this user alone (if its directory is private to the user)."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path)
    sock.listen(64)
    return sock


def main() -> None:
    """Serve on the socket with the given descriptor, or listen at the given path."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    if sys.argv[1] == "--listen":
        prepare()
        Zygote(listener=listen(sys.argv[2])).run()
        os._exit(0)  # workers live on: another process holds their lifelines
    sock = socket.socket(fileno=int(sys.argv[1]))
    if not children.can_fork():  # this process is not a fork of a prepared one
        prepare()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Zygote(sock).run()


if __name__ == "__main__":
    main()
