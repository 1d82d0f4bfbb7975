"""Durations, deadlines, sizes and job files as people write them."""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swell.cli._common import (
    choose_job,
    parse_bytes,
    parse_deadline,
    parse_duration,
    say_duration,
    say_moment,
    say_until,
)
from swell.cli._platform import Settings
from swell.cli.submit import read_job, template
from swell.cli.up import _words, up
from swell.control.errors import NotFound
from swell.domain import InputError
from swell.domain.request import FIELDS

NOON_S = datetime(2026, 3, 10, 12, 0).timestamp()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("90m", 5400), ("2h", 7200), ("1h30m", 5400), ("1.5d", 129600), ("2 H", 7200)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["5", "0", "1.5", " 90 "])
def test_a_number_without_a_unit_is_refused(tmp_path: Path, text: str) -> None:
    number = text.strip()
    with pytest.raises(ValueError, match=f"has no unit; write {number}s, {number}m"):
        parse_duration(text)
    with pytest.raises(ValueError, match=f"has no unit; write {number}s, {number}m"):
        parse_deadline(text, NOON_S)
    for field in ("deadline", "checkpoint", "time_limit"):
        (tmp_path / "job.toml").write_text(f'script = "t.py"\n{field} = {number}\n')
        with pytest.raises(InputError, match=f"{field}: '{number}' has no unit"):
            read_job(tmp_path / "job.toml")


@pytest.mark.parametrize("text", ["", "soon", "2x", "-5m", "0s", "nan", "inf", "2h later"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="like 90"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2h", datetime(2026, 3, 10, 14, 0)),
        ("18:30", datetime(2026, 3, 10, 18, 30)),
        ("09:00", datetime(2026, 3, 11, 9, 0)),
        ("today 12:01", datetime(2026, 3, 10, 12, 1)),
        ("tomorrow 09:00", datetime(2026, 3, 11, 9, 0)),
        ("Tomorrow  9:05", datetime(2026, 3, 11, 9, 5)),
        ("2026-03-12T09:00", datetime(2026, 3, 12, 9, 0)),
        ("2026-03-12 09:00", datetime(2026, 3, 12, 9, 0)),
    ],
)
def test_deadlines_are_read(text: str, moment: datetime) -> None:
    assert parse_deadline(text, NOON_S) == moment.timestamp()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eventually", "write it like 2h"),
        ("25:00", "not a time of day"),
        ("today 09:00", "in the past"),
        ("2020-01-01", "in the past"),
    ],
)
def test_what_is_no_deadline_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        parse_deadline(text, NOON_S)


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("512MB", 512_000_000), ("1.5g", 1_500_000_000), ("2048", 2048)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.25, "0.2s"), (45, "45s"), (200, "3m 20s"), (7500, "2h 05m"), (100_000, "1d 03h"), (None, "-")],
)
def test_durations_are_said(seconds: float | None, said: str) -> None:
    assert say_duration(seconds) == said


def test_moments_name_the_day_unless_it_is_today() -> None:
    assert say_moment(NOON_S + 60, NOON_S) == "12:01:00"
    assert say_moment(NOON_S + 86400, NOON_S) == "tomorrow 12:00"
    assert say_moment(NOON_S + 5 * 86400, NOON_S) == "2026-03-15 12:00"
    assert say_until(NOON_S + 120, NOON_S) == "12:02:00 (in 2m 00s)"
    assert say_until(NOON_S - 120, NOON_S) == "11:58:00 (2m 00s ago)"


def _listed(job_id: str, name: str, *, over: bool = False, at_s: float = 0.0) -> Any:
    phase = SimpleNamespace(value="finished" if over else "running")
    return SimpleNamespace(job_id=job_id, name=name, over=over, submitted_s=at_s, phase=phase, owner="ann")


def test_a_job_is_found_by_its_name_or_the_beginning_of_its_id_if_that_fits_one() -> None:
    known = [
        _listed("alpha1-aa", "alpha1"),
        _listed("alpha2-bb", "alpha2"),
        _listed("twin-cc", "twin"),
        _listed("twin-dd", "twin"),
        _listed("was-ee", "was", over=True, at_s=1.0),
        _listed("was-ff", "was", over=True, at_s=2.0),
        _listed("mixed-gg", "mixed", over=True, at_s=3.0),
        _listed("mixed-hh", "mixed", at_s=2.0),
    ]
    for text, found in (("alpha1", 0), ("alpha2-b", 1), ("twin-d", 3), ("was", 5), ("mixed", 7), ("mix", 7)):
        assert choose_job(known, text) is known[found], text
    for text, several in (
        ("alpha", "alpha1-aa alpha2-bb"),
        ("twin", "twin-cc twin-dd"),
        ("wa", "was-ee was-ff"),
    ):
        with pytest.raises(InputError) as refused:
            choose_job(known, text)
        assert all(job_id in str(refused.value) for job_id in several.split())
    for text in ("", "beta"):
        with pytest.raises(NotFound):
            choose_job(known, text)
    many = [_listed(f"a-{i:02}", "a", at_s=float(i)) for i in range(30)]
    with pytest.raises(InputError, match="is the name of 30 jobs") as refused:
        choose_job(many, "a")
    assert (
        "a-29" in str(refused.value)
        and "a-19" not in str(refused.value)
        and "and 20 more" in str(refused.value)
    )


def test_every_command_that_takes_a_job_finds_it_in_the_same_way() -> None:
    for path in (Path(up.callback.__code__.co_filename).parent).glob("*.py"):  # type: ignore[union-attr]
        text = path.read_text()
        takes = len(re.findall(r'@click\.(?:argument\("job"\)|option\("--job")', text))
        if path.name != "run.py":  # `swell resize` finds a job without a control plane, by its whole name
            assert len(re.findall(r"\bfind_job\(client, job\)", text)) >= takes, path


def test_the_template_is_a_job_file_and_stays_one_with_every_line_in_use(tmp_path: Path) -> None:
    text = template("job.toml", "digits", "train.py")
    path = tmp_path / "job.toml"
    path.write_text(text)
    script, options = read_job(path)
    assert script == str(tmp_path / "train.py")
    assert options == {"name": "digits", "args": [], "workdir": str(tmp_path)}
    used = "\n".join(
        line.removeprefix("# ") if " = " in line or line.startswith("# [") else line
        for line in text.splitlines()
    )
    path.write_text(used)
    _, options = read_job(path)
    assert set(options) == set(FIELDS) - {"script"}
    assert options["memory_bytes"] == 4 << 30
    assert options["checkpoint_s"] == 60.0
    assert options["env"] == {"OMP_NUM_THREADS": "1"}
    assert options["max_workers"] == 8
    assert "deadline_s" in options and options["auto"] is True


def test_yaml_and_json_say_the_same_as_toml(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'script = "t.py"\nargs = ["--lr", "0.1"]\nmax_workers = 2\n[env]\nA = "1"\n'
    )
    (tmp_path / "a.yaml").write_text("script: t.py\nargs: [--lr, 0.1]\nmax_workers: 2\nenv: {A: 1}\n")
    (tmp_path / "a.json").write_text(
        '{"script": "t.py", "args": ["--lr", 0.1], "max_workers": 2, "env": {"A": 1}}'
    )
    assert read_job(tmp_path / "a.toml") == read_job(tmp_path / "a.yaml") == read_job(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('name = "x"', "script is missing"),
        ('script = "t.py"\nmax_worker = 3', "there is no field 'max_worker'. Did you mean 'max_workers'?"),
        ('script = "t.py"\ngpus = 2', "changes that while it runs; max_workers bounds it"),
        ('script = "t.py"\nmax_workers = "3"', "max_workers: must be a whole number"),
        ('script = "t.py"\ndeadline = "soon"', "deadline: 'soon' is not a deadline"),
        ('script = "t.py"\nargs = "--lr 1"', "args: must be a list"),
        ("script = ", "is not TOML"),
    ],
)
def test_a_bad_job_file_is_refused_by_field(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_job(path)
    assert expected in str(refused.value)
    assert str(path) in str(refused.value)


def test_flags_override_the_job_file(tmp_path: Path) -> None:
    from swell.cli.submit import script_and_options

    path = tmp_path / "job.toml"
    path.write_text('name = "a"\nscript = "t.py"\nargs = ["1"]\nmax_workers = 2\n[env]\nA = "1"\nB = "2"\n')
    nothing: dict[str, Any] = dict.fromkeys(
        ("name", "deadline", "workdir", "min_workers", "max_workers", "workers", "memory", "checkpoint")
    )
    nothing |= {"max_restarts": None, "auto": False, "env": (), "pip": ()}
    _, options = script_and_options(str(path), (), **nothing)
    assert (options["name"], options["args"], options["max_workers"]) == ("a", ["1"], 2)
    _, options = script_and_options(
        str(path), ("2",), **nothing | {"name": "b", "max_workers": 4, "env": ("A=9",)}
    )
    assert (options["name"], options["args"], options["max_workers"]) == ("b", ["2"], 4)
    assert options["env"] == {"A": "9", "B": "2"}
    path.write_text('script = "t.py"\npip = ["einops"]\n')
    assert script_and_options(str(path), (), **nothing)[1]["pip"] == ["einops"]
    assert script_and_options(str(path), (), **nothing | {"pip": ("timm", "tqdm")})[1]["pip"] == [
        "timm",
        "tqdm",
    ]
    with pytest.raises(InputError, match="env must be NAME=VALUE"):
        script_and_options(str(path), (), **nothing | {"env": ("A",)})


def test_every_option_of_up_is_a_setting_and_reaches_a_control_plane_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SWELL_STORE", raising=False)
    texts = ["--nodes", "2x2", "--pass-env", "A", "--pass-env", "B", "--round", "30s", "--keep", "90d"]
    flags = ["--no-wall", "--no-spares", "--encrypt", "--end-unknown", "--ha", "--port", "0"]
    files = ["--keep-size", "5GiB", "--tls-cert", "/c.pem", "--store", "postgresql://me:secret@host/db"]
    given = up.make_context("up", [*texts, *flags, *files]).params
    settings = {name: given[name] for name in given if name not in ("detach", "as_json", "home")}
    assert settings.keys() <= {field.name for field in fields(Settings)}
    words = _words(settings)
    assert not any("secret" in word for word in words), "every user of the machine can see them"
    assert up.make_context("up", words).params == given | {"store": None}
