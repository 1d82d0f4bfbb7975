"""How a process of ours gets in touch with Ray: addresses, tokens, and errors that say what to do.

Only for the processes that speak to Ray (`scout`, supervisors); the control plane uses the parts without
Ray.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

CONNECT_S = 30.0
"""Ray itself tries for minutes; whoever waits wants to know sooner."""
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray takes 127.0.0.1 for the machine's outer address unless this is 0 (its name is history: other systems
have it so by default)."""
NAMESPACE = "swell"


def split(address: str) -> tuple[str, int] | None:
    """Host and port of an address; None for `auto`."""
    bare = address.removeprefix("ray://")
    host, colon, port = bare.rpartition(":")
    if not colon or not port.isdigit():
        return None
    return host.strip("[]"), int(port)


def answers(host: str, port: int, timeout_s: float = 3.0) -> bool:
    """Whether anybody listens there."""
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
    """This machine's address as others see it; 127.0.0.1 if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which address would be used
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def environment(address: str, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is to connect there."""
    env = {**os.environ, **extra, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    where = split(address)
    if where is not None and is_loopback(where[0]) and not answers(own_address(), where[1], 1.0):
        env[LOOPBACK] = "0"  # a Ray that is on the loopback alone
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

    # A client with a wrong token is tried again for ever by Ray: hence a thread to give up on.
    worker = threading.Thread(target=init, name="swell-ray-init", daemon=True)
    worker.start()
    worker.join(CONNECT_S)
    if worker.is_alive():
        raise ConnectionError(
            f"Ray at {address} did not answer within {CONNECT_S:g} s; if it wants a token, set "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's (see docs/ray.md)"
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
            f"Ray at {address} refused us: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token, "
            f"or put it into ~/.ray/auth_token ({text[:300]})"
        )
    if "version mismatch" in low or "versions" in low:
        return f"Ray at {address} is of another version: install the same here and there ({text[:300]})"
    if "grpc" in low and "import" in low:
        return f"ray:// needs Ray's client: pip install 'ray[client]' ({text[:200]})"
    if "failed to connect" in low:
        return (
            f"something listens at {address}, but no Ray that takes us: if the cluster has a token, set "
            f"RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to it; Ray must be of the same version ({text[:200]})"
        )
    if address == "auto":
        return f"no Ray cluster was found on this machine: give its address with --address ({text[:200]})"
    return f"Ray at {address} cannot be used: {text[:300]}"
