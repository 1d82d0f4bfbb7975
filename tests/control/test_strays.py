"""Jobs that the store does not know or says are over; homes and stores that do not belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from swell.api.auth import TokenBook, ensure_tokens
from swell.cli._platform import STORE_ID, check_store
from swell.control.model import Phase
from swell.control.plane import ControlPlane
from swell.control.store import Store, connect
from swell.domain import Cluster, InputError
from swell.engines import Observed, RunState
from swell.engines.null import NullEngine

from .conftest import make_record


def plane_with(tmp_path: Path, ended: list[str], **options: bool) -> ControlPlane:
    """A plane whose engine runs a job that is over and one that nobody knows."""
    store = Store(connect(str(tmp_path / "store.db")))
    store.accept(make_record("over-1", Phase.CANCELLED), None, [])
    engine = NullEngine(Cluster.parse("1x4"), duration_s=10.0)
    seen = {
        name: Observed(job_id=name, state=RunState.RUNNING, placement=(0,)) for name in ("over-1", "who-1")
    }
    engine.observe = lambda: dict(seen)  # type: ignore[method-assign]
    engine.end = ended.append  # type: ignore[method-assign]
    plane = ControlPlane(store, engine, home=tmp_path, **options)  # type: ignore[arg-type]
    plane.come_up()
    return plane


def test_a_job_that_is_over_is_ended_and_one_that_nobody_knows_is_left_alone(tmp_path: Path) -> None:
    ended: list[str] = []
    plane = plane_with(tmp_path, ended)
    for _ in range(3):
        plane.turn()
    assert set(ended) == {"over-1"}
    assert plane.stats()["strays"] == 1.0
    plane.stop()
    plane.store.close()


def test_the_operator_can_have_unknown_jobs_ended(tmp_path: Path) -> None:
    ended: list[str] = []
    plane = plane_with(tmp_path, ended, end_unknown=True)
    plane.turn()
    assert set(ended) == {"over-1", "who-1"}
    plane.stop()
    plane.store.close()


def test_a_home_refuses_another_store(tmp_path: Path) -> None:
    right, wrong = Store(connect(str(tmp_path / "a.db"))), Store(connect(str(tmp_path / "b.db")))
    check_store(tmp_path, right)
    check_store(tmp_path, right)
    with pytest.raises(InputError, match=f"belongs to the store with the id {right.identity}") as refused:
        check_store(tmp_path, wrong)
    assert refused.value.field == "store"
    (tmp_path / STORE_ID).unlink()
    check_store(tmp_path, wrong)


def test_an_empty_store_keeps_the_tokens_of_its_home(tmp_path: Path) -> None:
    right, empty = Store(connect(str(tmp_path / "a.db"))), Store(connect(str(tmp_path / "b.db")))
    (admin, _) = ensure_tokens(TokenBook(right), tmp_path)
    secret = admin.read_text().strip()
    book = TokenBook(empty)
    assert ensure_tokens(book, tmp_path) == []
    assert admin.read_text().strip() == secret, "with the right store back, it still opens"
    for tokens in (book, TokenBook(right)):
        assert tokens.authenticate(f"Bearer {secret}").user == "admin"
