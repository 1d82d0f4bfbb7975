"""What others need for the same, measured here: torchrun, torchft and Ray Train after a kill -9."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from benchmarks.runtime.children import end

SCRIPT = """
    import os, time, torch, torch.distributed as dist
    from torch import nn
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    log = open(os.environ["STEPS"] + f".{dist.get_rank()}", "a", buffering=1)
    for _ in range(100_000):
        optimizer.zero_grad()
        model(torch.randn(32, 256)).sum().backward()
        optimizer.step()
        log.write(f"{os.getpid()} {time.monotonic()}\\n")
        time.sleep(0.01)
"""


def torchrun_death(rounds: int = 2, timeout_s: float = 30.0) -> dict[str, Any]:
    """From a kill -9 of one of three workers to the first step after it (torchrun restarts all of them)."""
    times: list[float] = []
    hung = 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found = _torchrun_once(Path(folder), timeout_s)
            hung += found is None
            times += [] if found is None else [found]
    median = round(statistics.median(times), 2) if times else None
    return {"median_s": median, "rounds": rounds, "hung": hung}


def _torchrun_once(folder: Path, timeout_s: float) -> float | None:
    script, log = folder / "train.py", folder / "steps"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    process = _start([*command, "--max-restarts=2", str(script)], {**os.environ, "STEPS": str(log)})
    try:
        return _killed_and_back(log, timeout_s)
    finally:
        end(process)  # its workers are in sessions of their own


def _wait(path: Path, found: Any, timeout_s: float, words: int = 2) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists():
            lines = [tuple(line.split()) for line in path.read_text().splitlines()]
            value = found([line for line in lines if len(line) == words])
            if value is not None:
                return value
        time.sleep(0.02)
    return None


TORCHFT = """
    import os, time, torch
    from datetime import timedelta
    from torch import nn
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    torch.set_num_threads(1)
    name = os.environ["REPLICA"]
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = nn.Linear(256, 256)
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    def load(state):
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=2, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
        lighthouse_addr=os.environ["LIGHTHOUSE"], replica_id=name,
        timeout=timedelta(seconds=5), quorum_timeout=timedelta(seconds=20),
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    log = open(os.environ["STEPS"] + f".{name}", "a", buffering=1)
    while True:
        optimizer.zero_grad()
        wrapped(torch.randn(32, 256)).sum().backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            log.write(f"{os.getpid()} {time.monotonic()} {manager.num_participants()}\\n")
        time.sleep(0.01)
"""


def torchft_death(rounds: int = 2, timeout_s: float = 40.0) -> dict[str, Any]:
    """From a kill -9 of one of three replicas to the next step of another one; it waits 0.2 s for joiners."""
    if importlib.util.find_spec("torchft") is None:
        return {"skipped": "torchft is not installed"}
    times = [_torchft_once(timeout_s) for _ in range(rounds)]
    found = [t for t in times if t is not None]
    median = round(statistics.median(found), 2) if found else None
    return {"median_s": median, "rounds": rounds, "hung": rounds - len(found)}


LIGHTHOUSE = """
    import sys, time
    from pathlib import Path
    from torchft.coordination import LighthouseServer
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=200)
    Path(sys.argv[1]).write_text(server.address())
    time.sleep(1000)
"""


def _torchft_once(timeout_s: float) -> float | None:
    with tempfile.TemporaryDirectory() as folder:
        script, log, found = (Path(folder) / name for name in ("train.py", "steps", "address"))
        script.write_text(textwrap.dedent(TORCHFT))
        processes = [
            _start([sys.executable, "-c", textwrap.dedent(LIGHTHOUSE), str(found)], dict(os.environ))
        ]
        try:
            address = _wait(found, lambda lines: lines[0][0] if lines else None, timeout_s, 1)
            env = {**os.environ, "STEPS": str(log), "LIGHTHOUSE": str(address)}
            command = [sys.executable, str(script)]
            processes += [_start(command, {**env, "REPLICA": f"r{index}"}) for index in range(3)]

            def all_three(lines: list[tuple[str, ...]]) -> Any:
                return lines[-1][0] if len(lines) > 20 and lines[-1][2] == "3" else None

            if _wait(Path(f"{log}.r0"), all_three, timeout_s, 3) is None:
                return None
            killed = time.monotonic()
            processes[2].kill()

            def with_two(lines: list[tuple[str, ...]]) -> Any:
                return next((t for _, t, count in lines if float(t) > killed and count == "2"), None)

            back = _wait(Path(f"{log}.r0"), with_two, timeout_s, 3)
            return None if back is None else float(back) - killed
        finally:
            for process in processes:
                process.kill()
                process.wait(10)


RAY = """
    import os, signal, sys, tempfile, time
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray, ray.train, ray.train.torch, torch
    from torch import nn

    def loop(config):
        torch.set_num_threads(1)
        model = ray.train.torch.prepare_model(nn.Linear(256, 256))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        log = open(f"{config['log']}.{ray.train.get_context().get_world_rank()}", "a", buffering=1)
        for step in range(100_000):
            optimizer.zero_grad()
            model(torch.randn(32, 256)).sum().backward()
            optimizer.step()
            log.write(f"{os.getpid()} {time.monotonic()}\\n")
            time.sleep(0.01)

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    ray.train.torch.TorchTrainer(
        loop, train_loop_config={"log": os.environ["STEPS"]},
        scaling_config=ray.train.ScalingConfig(num_workers=(2, 3)),
        run_config=ray.train.RunConfig(
            storage_path=os.environ["STORAGE"], failure_config=ray.train.FailureConfig(max_failures=3)),
    ).fit()
"""


def ray_death(rounds: int = 1, timeout_s: float = 90.0) -> dict[str, Any]:
    """From a kill -9 of one of three workers of an elastic Ray Train job to the first step after it."""
    missing = [name for name in ("ray", "pandas", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        return {"skipped": f"ray[train] is not installed: no {', '.join(missing)}"}
    found = [t for t in (_ray_once(timeout_s) for _ in range(rounds)) if t is not None]
    median = round(statistics.median(found), 2) if found else None
    return {"median_s": median, "rounds": rounds, "hung": rounds - len(found)}


def _ray_once(timeout_s: float) -> float | None:
    with tempfile.TemporaryDirectory() as folder:
        script, log = Path(folder) / "train.py", Path(folder) / "steps"
        script.write_text(textwrap.dedent(RAY))
        env = {**os.environ, "STEPS": str(log), "STORAGE": folder}
        process = _start([sys.executable, str(script)], env)
        try:
            return _killed_and_back(log, timeout_s)
        finally:
            end(process)


def _start(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process whose messages go to this part's log: they say why one never came to its first step."""
    return subprocess.Popen(command, env=env, stdout=sys.stderr, start_new_session=True)


def _killed_and_back(log: Path, timeout_s: float) -> float | None:
    """Kill the worker of rank 1; seconds until rank 0 steps again in another process."""
    first, second = Path(f"{log}.0"), Path(f"{log}.1")
    pid = _wait(first, lambda lines: lines[-1][0] if len(lines) > 20 else None, timeout_s)
    victim = _wait(second, lambda lines: lines[-1][0] if lines else None, timeout_s)
    if pid is None or victim is None:
        return None
    killed = time.monotonic()
    os.kill(int(victim), signal.SIGKILL)
    back = _wait(
        first, lambda lines: next((t for p, t in lines if p != pid and float(t) > killed), None), timeout_s
    )
    return None if back is None else float(back) - killed


if __name__ == "__main__":
    print(json.dumps({"torchrun": torchrun_death(1), "torchft": torchft_death(1), "ray": ray_death(1)}))
