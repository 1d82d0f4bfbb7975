"""The audit log: who asked for what, bounded, for its owner only."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from swell.api.auth import AuditLog

from .conftest import Platform


def entries(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "audit.log").read_text().splitlines()]


def test_changes_and_refusals_are_in_the_log_and_reading_is_not(busy_platform: Platform) -> None:
    with busy_platform.http(busy_platform.token("ann")) as http, busy_platform.http("swell_x") as stranger:
        job = http.post("/v1/jobs", json=busy_platform.job()).json()["job_id"]
        http.get("/v1/jobs")
        http.post(f"/v1/jobs/{job}/cancel")
        assert http.put("/v1/policy", json={"policy": "afs-l"}).status_code == 403
        for _ in range(50):
            assert stranger.get("/v1/jobs").status_code == 401
    found = entries(busy_platform.home)
    assert [(e["user"], e["method"], e["path"], e["status"]) for e in found[:3]] == [
        ("ann", "POST", "/v1/jobs", 201),
        ("ann", "POST", f"/v1/jobs/{job}/cancel", 200),
        ("ann", "PUT", "/v1/policy", 403),
    ]
    assert found[0]["job_id"] == job and found[0]["address"] == "127.0.0.1"
    assert 1 <= len(found) - 3 < 30, "a stranger writes a few lines a second"
    assert all(e["user"] is None and e["status"] == 401 for e in found[3:])
    assert stat.S_IMODE((busy_platform.home / "audit.log").stat().st_mode) == 0o600


def test_the_file_is_bounded_and_a_full_disk_costs_no_request(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.log", most_bytes=1000)
    for n in range(100):
        log.write(user="ann", n=n)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes["audit.log.1"] < 1200 and sizes.get("audit.log", 0) <= 1000  # it may just have been renamed
    assert set(sizes) <= {"audit.log", "audit.log.1"}
    full = AuditLog(Path("/dev/full"))
    full.write(user="ann")
    assert full.dropped == 1
