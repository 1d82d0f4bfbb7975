"""deploy/grafana.json: every figure that it shows exists, by our own page and by a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path

import httpx2
import pytest
from tests.api.conftest import Platform
from tests.waiting import wait_until

BOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
EVERY_INSTANCE = ".*"


def test_every_figure_of_the_dashboard_is_on_the_page_for_prometheus(platform: Platform) -> None:
    with platform.http(platform.token("grafana")) as http:
        http.get("/v1/jobs")
        page = http.get("/metrics").text
    there = set(re.findall(r"^(swell_\w+)", page, flags=re.MULTILINE))
    shown = {name for text in EXPRESSIONS for name in re.findall(r"\bswell_\w+", text)}
    assert len(shown) > 12
    assert shown <= there


def test_panels_have_titles_numbers_and_places_of_their_own() -> None:
    panels = BOARD["panels"]
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in panels)
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells = [
        (column, row)
        for place in (panel["gridPos"] for panel in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(column for column, _ in cells) < 24


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no Prometheus on this machine")
def test_a_real_prometheus_answers_every_question_of_the_dashboard(
    platform: Platform, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(platform.token("prometheus"))
    address = platform.server.url.removeprefix("http://").rstrip("/")
    scrape = {
        "job_name": "swell",
        "authorization": {"credentials_file": str(tmp_path / "token")},
        "static_configs": [{"targets": [address]}],
    }
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    prometheus = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "log").open("w"),
    )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=10.0, trust_env=False) as http:

            def answered() -> bool:
                try:
                    return all(_result(http, text) for text in EXPRESSIONS)
                except httpx2.TransportError:
                    return False  # it does not listen yet

            wait_until(
                answered, 60, lambda: [text for text in EXPRESSIONS if not _result(http, text)], poll_s=0.5
            )
    finally:
        prometheus.terminate()
        prometheus.wait(30)


def _result(http: httpx2.Client, expression: str) -> list[object]:
    asked = expression.replace("$instance", EVERY_INSTANCE)
    answer = http.get("/api/v1/query", params={"query": asked}).json()
    assert answer["status"] in ("success", "error"), answer
    assert answer.get("errorType") != "bad_data", answer  # Prometheus cannot read the expression
    found: list[object] = answer.get("data", {}).get("result", [])
    return found
