"""The environment of jobs: what their owner gave, and of the platform's own only what programs need to run.

The operator's environment may hold anything: passwords of databases, keys of clouds, Ray's token. So a job
gets the names on a list and no others. `swell up --pass-env NAME` adds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "HOSTNAME"),
        *(
            "VIRTUAL_ENV",
            "CONDA_PREFIX",
            "LD_LIBRARY_PATH",
            "LD_PRELOAD",
            "XDG_CACHE_HOME",
            "XDG_RUNTIME_DIR",
        ),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "SWELL_DATA"),
    )
)
PREFIXES = ("LC_", "PYTHON", "CUDA", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "NUMBA_", "TORCH_")


def for_jobs(environment: Mapping[str, str], passed: Iterable[str] = ()) -> dict[str, str]:
    """The part of an environment that jobs may have; `passed`: further names that the operator allows."""
    allowed = NAMES | set(passed)
    return {
        name: value
        for name, value in environment.items()
        if name in allowed or (name.startswith(PREFIXES) and "TOKEN" not in name)
    }
