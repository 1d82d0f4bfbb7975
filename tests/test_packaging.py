"""The package: a light core, extras that errors name, and one version."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import swell

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "swell"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

SERVER = ["fastapi", "starlette", "uvicorn", "httptools", "uvloop", "prometheus_client"]
NOT_IN_CORE = [*SERVER, "numba", "scipy", "torch", "ray", "psycopg", "virtualenv", "cryptography"]

# Python imports a module of this name by itself at the start of every process, so workers are blocked too.
BLOCKER = """
import os, sys

class Blocker:
    names = frozenset(os.environ["BLOCKED_MODULES"].split())

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""

TRAIN = """
import torch, swell

torch.manual_seed(0)
x = torch.randn(400, 4)
model = torch.nn.Linear(4, 1)
job = swell.elastic(model, torch.optim.SGD(model.parameters(), lr=0.05), mode="adaptive", max_batch=80)
loader = job.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=20)
for _ in job.epochs(15):
    for a, b in loader:
        job.step(torch.nn.functional.mse_loss(model(a), b))
if job.is_leader:
    print("trained on", job.world, flush=True)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def without(tmp_path: Path) -> Run:
    """Run Python where some modules cannot be imported, in this process and all that it starts."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)

    def run(blocked: list[str], *words: str) -> subprocess.CompletedProcess[str]:
        paths = [str(tmp_path), str(ROOT / "src")]
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(paths),
                "BLOCKED_MODULES": " ".join(blocked),
                "SWELL_HOME": str(tmp_path / "home"),
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def test_the_client_and_the_commands_need_the_core_alone(without: Run) -> None:
    done = without(NOT_IN_CORE, "-c", "import swell; swell.Client('http://127.0.0.1:1', 'token')")
    assert done.returncode == 0, done.stderr
    done = without(NOT_IN_CORE, "-m", "swell", "queue")
    assert (done.returncode, done.stdout) == (1, "")
    assert "start one with 'swell up'" in done.stderr


def test_training_needs_neither_a_server_nor_scipy(without: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    blocked = [*SERVER, "scipy", "ray", "psycopg"]
    done = without(blocked, "-m", "swell", "run", "--workers", "2", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained on 2" in done.stdout


@pytest.mark.parametrize(
    ("blocked", "words", "said"),
    [
        (SERVER, "up -d", "swell: 'swell up' needs the server parts: pip install 'swell[server]'\n"),
        (["numba"], "generate", "'swell generate' needs the simulator's parts: pip install 'swell[sim]'"),
        (["ray"], "up --engine ray", "pip install 'swell[ray]'"),
    ],
)
def test_a_command_whose_extra_is_missing_names_it(
    without: Run, blocked: list[str], words: str, said: str
) -> None:
    done = without(blocked, "-m", "swell", *words.split())
    assert done.returncode == 1, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("blocked", "code", "said"),
    [
        (
            SERVER,
            "import swell.api.server",
            "swell.api.server needs the server parts: pip install 'swell[server]'",
        ),
        (["torch"], "import swell; swell.elastic", "swell.elastic needs PyTorch: pip install 'swell[torch]'"),
        (["xgboost"], "import swell.xgboost", "swell.xgboost needs XGBoost: pip install 'swell[xgboost]'"),
    ],
)
def test_an_import_whose_extra_is_missing_names_it(
    without: Run, blocked: list[str], code: str, said: str
) -> None:
    done = without(blocked, "-c", code)
    assert done.returncode == 1
    assert said in done.stderr


def test_every_module_that_is_imported_is_declared() -> None:
    declared = {
        re.split(r"[\[><=; ]", requirement)[0].replace("-", "_").lower()
        for requirement in [
            *PROJECT["dependencies"],
            *(r for name, extra in PROJECT["optional-dependencies"].items() if name != "dev" for r in extra),
        ]
    }
    declared |= {"yaml", "starlette", "mlflow"}  # of pyyaml, fastapi and mlflow-skinny
    imported = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.partition(".")[0])
    assert imported - set(sys.stdlib_module_names) - declared == set()


def test_the_version_is_written_once() -> None:
    assert PROJECT["dynamic"] == ["version"]
    sources = [path for path in SOURCES.rglob("*.py") if f'"{swell.__version__}"' in path.read_text()]
    assert sources == [SOURCES / "__init__.py"]
