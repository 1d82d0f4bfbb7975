"""The files in deploy/: they parse, and name what they must."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import swell
from swell.engines.ray import tls
from swell.engines.ray.head import CLUSTER_SETTINGS

DEPLOY = Path(__file__).parents[2] / "deploy"


def documents() -> dict[str, dict[str, Any]]:
    return {d["kind"]: d for d in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())}


def test_the_kuberay_manifest_has_what_it_takes(tmp_path: Path) -> None:
    found = documents()
    assert set(found) == {"PersistentVolumeClaim", "RayCluster", "Deployment", "Service", "NetworkPolicy"}
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    cluster = found["RayCluster"]["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [g["template"]["spec"] for g in groups] + [found["Deployment"]["spec"]["template"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        assert container["volumeMounts"][0] == {"name": "home", "mountPath": "/swell"}
        assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "swell-home"}
        given = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= given.keys()
        assert given.keys() >= tls.ensure(tmp_path).keys() and given["RAY_USE_TLS"] == "1"
        (first,) = pod["initContainers"]
        assert first["image"] == container["image"] and first["volumeMounts"] == container["volumeMounts"][:2]
        assert "-m swell.engines.ray.tls /swell " in first["args"][0] and "--out /ray-tls" in first["args"][0]
        assert {"name": "ray-tls", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
        assert pod["securityContext"]["runAsUser"] == 1000
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1, "one image for all"
    health = json.loads(cluster["headGroupSpec"]["rayStartParams"]["system-config"].strip("'"))
    assert health == CLUSTER_SETTINGS
    (command,) = pods[-1]["containers"][0]["args"]
    assert f"ray start --address={found['RayCluster']['metadata']['name']}-head-svc:6379" in command
    assert "--num-cpus=0" in command and "exec swell up --engine=ray --address=auto" in command


def test_every_cluster_is_told_the_same_health_checks_which_outlast_a_head_away_for_a_minute() -> None:
    each_s = (CLUSTER_SETTINGS["health_check_period_ms"] + CLUSTER_SETTINGS["health_check_timeout_ms"]) / 1e3
    assert each_s * CLUSTER_SETTINGS["health_check_failure_threshold"] >= 120
    for path in (DEPLOY / "slurm.sh", DEPLOY.parent / "docs" / "guides" / "ray.md"):
        (found,) = re.findall(r"\{\s*\"health_check.*?\}", path.read_text(), re.DOTALL)
        assert json.loads(found) == CLUSTER_SETTINGS, path.name


def test_the_kuberay_manifest_lets_nobody_in_without_tls() -> None:
    found = documents()
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (command,) = pod["containers"][0]["args"]
    assert "--insecure" not in command and "--tls-cert=/tls/tls.crt --tls-key=/tls/tls.key" in command
    assert {"name": "tls", "secret": {"secretName": "swell-tls"}} in pod["volumes"]
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == {} and policy["policyTypes"] == ["Ingress"], "all pods of the namespace"
    inside, outside = policy["ingress"]
    assert inside == {"from": [{"podSelector": {}}]}
    assert outside["ports"] == [{"protocol": "TCP", "port": 7373}]
    assert outside["from"] == [{"namespaceSelector": {"matchLabels": {"swell-access": "true"}}}]


def test_versions_agree_with_what_is_tested() -> None:
    constraints = dict(
        line.split("==")
        for line in (DEPLOY.parent / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert documents()["RayCluster"]["spec"]["rayVersion"] == constraints["ray"]
    assert "constraints.txt" in (DEPLOY / "Containerfile").read_text()
    for name in ("Containerfile", "kuberay.yaml"):
        assert set(re.findall(r"/swell:(\d\S*)", (DEPLOY / name).read_text())) == {swell.__version__}


@pytest.mark.parametrize("name", ["slurm.sh"])
def test_shell_scripts_parse_and_stop_at_errors(name: str) -> None:
    script = DEPLOY / name
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "set -euo pipefail" in script.read_text() and "#SBATCH" in script.read_text()
    assert "RAY_AUTH_TOKEN_PATH" in script.read_text()


def test_on_slurm_every_ray_process_and_the_control_plane_get_a_certificate_of_their_node(
    tmp_path: Path,
) -> None:
    text = (DEPLOY / "slurm.sh").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("TLS=")]
    starts = text.count("ray start ")
    assert text.count("""bash -c "$TLS"' && exec "$@"' bash""") == starts == 2 and 'eval "$TLS"' in text
    python = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euc", f"""{line}\nbash -c "$TLS"' && exec "$@"' bash env; eval "$TLS"; env"""],
        capture_output=True, text=True, check=True,
        env={"PATH": f"{python}:/usr/bin:/bin", "SWELL_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.count("RAY_USE_TLS=1") == 2 and done.stdout.count("RAY_TLS_SERVER_KEY=") == 2


def test_the_container_file_names_a_user_and_installs_ray() -> None:
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    assert any(line.startswith("FROM ") for line in lines) and "USER ray" in lines
    assert any("'.[all]'" in line for line in lines)
