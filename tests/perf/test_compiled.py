"""Compiled code on machines on which little can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import numba
from swell.perf._compiled import compiled

@compiled
def twice(x):
    return 2 * x

print(twice(21), numba.config.CACHE_DIR)
"""
PREPARED = """
mount --bind {read_only} {read_only} && mount -o remount,bind,ro {read_only} || exit 77
exec env -u XDG_CACHE_HOME -u NUMBA_CACHE_DIR HOME={read_only} TMPDIR={temporary} {python} {read_only}/code.py
"""


@pytest.mark.parametrize("place", ["free", "open to others"])
def test_compiled_code_runs_where_neither_the_installation_nor_the_home_can_be_written(
    tmp_path: Path, place: str
) -> None:
    read_only, temporary = tmp_path / "installed", tmp_path / "temporary"
    read_only.mkdir()
    temporary.mkdir()
    kept = temporary / f"swell-compiled-{os.getuid()}"
    if place == "open to others":  # who puts code there has it run by this account
        kept.mkdir()
        kept.chmod(0o777)
    (read_only / "code.py").write_text(SCRIPT)
    script = PREPARED.format(read_only=read_only, temporary=temporary, python=sys.executable)
    own = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    done = subprocess.run([*own, "sh", "-c", script], capture_output=True, text=True, timeout=120)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"this machine allows no mount namespace: {done.stderr}")
    assert done.returncode == 0, done.stderr
    answer, *folder = done.stdout.split()
    assert answer == "42"
    if place == "free":
        assert folder == [str(kept)] and kept.stat().st_mode & 0o777 == 0o700
        assert list(kept.rglob("*.nbi")) and not done.stderr
    else:
        assert not folder and not list(kept.iterdir())
        assert done.stderr.count("\n") == 1 and "NUMBA_CACHE_DIR" in done.stderr
