"""The optional parts of the package: what to install when a module of one of them is missing.

The core is what a person's machine and a worker need: the commands, the client and, with torch, training.
The extras are declared in pyproject.toml.
"""

from __future__ import annotations

from swell.domain.errors import SwellError

_PARTS = {
    "server": "the server parts",
    "sim": "the simulator's parts",
    "torch": "PyTorch",
    "ray": "Ray",
    "postgres": "the Postgres driver",
    "sweep": "Optuna",
    "top": "textual",
    "png": "resvg and a font, which draw pixels,",
    "xgboost": "XGBoost",
    "track": "the experiment trackers",
}
_EXTRA_OF_MODULE = {
    "fastapi": "server",
    "prometheus_client": "server",
    "starlette": "server",
    "uvicorn": "server",
    "numba": "sim",
    "scipy": "sim",
    "torch": "torch",
    "ray": "ray",
    "psycopg": "postgres",
    "optuna": "sweep",
    "textual": "top",
    "resvg_py": "png",
    "ttf_opensans": "png",
    "xgboost": "xgboost",
    "mlflow": "track",
    "tensorboard": "track",
    "wandb": "track",
}


class MissingExtra(SwellError, ImportError):
    """A module is missing that one of the package's extras would have installed."""

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.name = module


def missing_extra(error: ImportError, who: str) -> MissingExtra | None:
    """The error that names the extra to install, or None if no extra has the module that is missing.

    `who` is what needs it, as the subject of the sentence: a command or a part of the API.
    """
    module = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF_MODULE.get(module)
    if extra is None:
        return None
    return MissingExtra(f"{who} needs {_PARTS[extra]}: pip install 'swell[{extra}]'", module)
