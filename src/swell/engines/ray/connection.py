"""How a swell process connects to Ray: addresses, tokens, and errors that say what to do.

`connect` imports Ray, so only the scout and the supervisors call it; the control plane uses the rest.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from swell.engines.processes import for_jobs

CONNECT_S = 30.0
"""Longest attempt to connect. Ray itself would try for minutes."""
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable of Ray. Unless it is 0, Ray replaces 127.0.0.1 by the machine's outer address. (Its
name has historical reasons: 0 is the default on Windows and macOS.)"""
NAMESPACE = "swell"


def split(address: str) -> tuple[str, int] | None:
    """Host and port of an address; None for `auto`."""
    bare = address.removeprefix("ray://")
    host, colon, port = bare.rpartition(":")
    if not colon or not port.isdigit():
        return None
    return host.strip("[]"), int(port)


def answers(host: str, port: int, timeout_s: float = 3.0) -> bool:
    """Whether a process accepts connections at this address."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def is_loopback(host: str) -> bool:
    """Whether an address never leaves this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address() -> str:
    """This machine's address as other machines see it; 127.0.0.1 if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the system only picks the address to use
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def environment(
    address: str, extra: Mapping[str, str], passed: Sequence[str] | None = None
) -> dict[str, str]:
    """The environment for a process that is to connect to Ray at this address.

    With `passed` it is a job's: what jobs may have, those names, and what Ray needs. Else the platform's.
    """
    rays = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    own = dict(os.environ) if passed is None else for_jobs(os.environ, passed) | rays
    env = {**own, **extra, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    where = split(address)
    if where is not None and is_loopback(where[0]) and not answers(own_address(), where[1], 1.0):
        env[LOOPBACK] = "0"  # this Ray listens on the loopback only
    return env


def connect(address: str, runtime_env: dict[str, Any] | None = None) -> Any:
    """Connect this process to Ray, or raise ConnectionError with a line for people; never hangs."""
    import ray

    where = split(address)
    if where is not None and not answers(*where):
        raise ConnectionError(
            f"nothing listens at {address}: is the Ray cluster up, and the port open from here?"
        )
    trouble: list[BaseException] = []

    def init() -> None:
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=runtime_env,
            )
        except BaseException as error:
            trouble.append(error)

    # With a wrong token Ray tries for ever, so it tries in a thread that can be given up.
    worker = threading.Thread(target=init, name="swell-ray-init", daemon=True)
    worker.start()
    worker.join(CONNECT_S)
    if worker.is_alive():
        raise ConnectionError(
            f"Ray at {address} did not answer within {CONNECT_S:g} s; if the cluster has a token, set "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to it (see docs/guides/ray.md)"
        )
    if trouble:
        raise ConnectionError(explain(address, trouble[0])) from trouble[0]
    return ray


def explain(address: str, error: BaseException) -> str:
    """What went wrong, and what to do about it."""
    text = " ".join(str(error).split())
    low = text.lower()
    if "token" in low or "unauthenticated" in low or "auth" in low:
        return (
            f"Ray at {address} refused the connection: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the "
            f"cluster's token, or put it into ~/.ray/auth_token ({text[:300]})"
        )
    if "version mismatch" in low or "versions" in low:
        return f"Ray at {address} has another version than Ray here: install the same one ({text[:300]})"
    if "grpc" in low and "import" in low:
        return f"ray:// needs Ray's client: pip install 'ray[client]' ({text[:200]})"
    if "failed to connect" in low:
        return (
            f"something listens at {address}, but Ray cannot connect to it: if the cluster has a token, set "
            f"RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to it; Ray must have the same version ({text[:200]})"
        )
    if address == "auto":
        return f"no Ray cluster was found on this machine: give its address with --address ({text[:200]})"
    return f"Ray at {address} cannot be used: {text[:300]}"
