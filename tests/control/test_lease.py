"""The lease: one control plane leads, and nothing is decided or written by one that does no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.conftest import make_record
from tests.waiting import wait_until

from swell.control.errors import NotLeading, StoreUnavailable
from swell.control.lease import LEASE_S, REST_S, Leader, LeaseCandidate, LeaseHolder, Succession, Tenure
from swell.control.postgres import PostgresDatabase, PostgresLease
from swell.control.store import Store, connect
from swell.domain import SwellError


@dataclass
class Table:
    """A lease in memory, with the rules of the one in Postgres."""

    now_s: float = 0.0
    number: int = 0
    holder: LeaseHolder | None = None
    until_s: float = float("-inf")
    cut_off: set[str] = field(default_factory=set)
    """Names of the control planes that cannot reach it."""

    def seen_by(self, name: str) -> _Seen:
        return _Seen(self, name)


@dataclass
class _Seen:
    """The table, over the connection of one control plane."""

    table: Table
    name: str

    def _reach(self) -> Table:
        if self.name in self.table.cut_off:
            raise StoreUnavailable("cut off")
        return self.table

    def take(self, holder: LeaseHolder) -> int | None:
        table = self._reach()
        if table.until_s > table.now_s:
            return None
        table.number, table.holder, table.until_s = table.number + 1, holder, table.now_s + LEASE_S
        return table.number

    def renew(self, number: int) -> bool:
        table = self._reach()
        if table.number != number:
            return False
        table.until_s = table.now_s + LEASE_S
        return True

    def release(self, number: int) -> None:
        table = self._reach()
        if table.number == number:
            table.number, table.until_s = number + 1, float("-inf")

    def leader(self) -> Leader | None:
        table = self._reach()
        alive = table.until_s > table.now_s and table.holder is not None
        return Leader(table.number, table.holder) if alive and table.holder is not None else None

    def close(self) -> None:
        pass


def candidate(table: Table, name: str) -> LeaseCandidate:
    return LeaseCandidate(
        table.seen_by(name), LeaseHolder(name, f"http://{name}", name), clock=lambda: table.now_s
    )


NAMES = "abc"
ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.sampled_from(NAMES)),
    st.tuples(st.just("cut"), st.sampled_from(NAMES)),
    st.tuples(st.just("mend"), st.sampled_from(NAMES)),
    st.tuples(st.just("release"), st.sampled_from(NAMES)),
    st.tuples(st.just("pass"), st.floats(0.01, 7.0)),
)


@settings(max_examples=200)
@given(st.lists(ACTIONS, max_size=60))
def test_never_two_lead_and_numbers_only_grow(actions: list[tuple[str, str | float]]) -> None:
    table = Table()
    planes = {name: candidate(table, name) for name in NAMES}
    highest = 0
    for action, what in actions:
        if action == "pass":
            table.now_s += float(what)
        elif action == "cut":
            table.cut_off.add(str(what))
        elif action == "mend":
            table.cut_off.discard(str(what))
        else:
            plane = planes[str(what)]
            before = plane.tenure
            plane.step() if action == "step" else plane.give_up()
            if plane.tenure is not None and plane.tenure is not before:
                assert plane.tenure.number > highest
                highest = plane.tenure.number
        leading = [name for name, plane in planes.items() if plane.tenure is not None and plane.tenure.valid]
        assert len(leading) <= 1
        assert not leading or table.number == highest, "a valid tenure is that of the number in the store"


def test_a_silent_leader_is_followed_within_the_lease_and_a_release_at_once() -> None:
    table = Table()
    a, b = candidate(table, "a"), candidate(table, "b")
    a.step(), b.step()
    assert a.tenure is not None and a.tenure.valid and b.tenure is None
    assert b.leader == Leader(1, a.holder)
    table.now_s = LEASE_S - 0.01
    b.step()
    assert b.tenure is None and not a.tenure.valid, "the old tenure ends before another can begin"
    table.now_s = LEASE_S
    b.step()
    assert b.tenure is not None and b.tenure.number == 2
    frozen = a.tenure
    a.step()  # it goes on, and finds that it leads no longer
    assert frozen.over and a.tenure is None and a.leader == Leader(2, b.holder)
    b.give_up()
    a.step()
    assert a.tenure is not None and a.tenure.number > 2


def test_a_leader_that_was_cut_off_for_a_while_goes_on_if_nobody_took_over() -> None:
    table = Table()
    a = candidate(table, "a")
    a.step()
    tenure = a.tenure
    table.cut_off.add("a")
    table.now_s = 60.0
    a.step()
    assert tenure is not None and not tenure.valid and a.trouble == "cut off"
    table.cut_off.clear()
    a.step()
    assert a.tenure is tenure and tenure.valid and not a.trouble


def test_who_cannot_lead_leaves_it_to_others_and_says_why() -> None:
    table, led = Table(), list[str]()

    def fail(_: Tenure) -> Callable[[], None]:
        raise SwellError("there is no Ray")

    def lead(tenure: Tenure) -> Callable[[], None]:
        led.append(f"up {tenure.number}")
        return lambda: led.append("down")

    a, b = candidate(table, "a"), candidate(table, "b")
    broken, good = Succession(a, fail), Succession(b, lead)
    a.step()
    broken.follow()
    assert a.tenure is None and "there is no Ray" in a.trouble
    a.step()
    assert a.tenure is None and "there is no Ray" in a.trouble, "it rests"
    b.step()
    good.follow(), good.follow()
    assert led == ["up 3"], "one came and went, and its release counts too"
    table.now_s += LEASE_S + REST_S  # b is frozen
    a.step()
    b.step()
    good.follow()
    assert led == ["up 3", "down"]


def test_a_leader_that_is_stopped_hands_over_before_it_has_tidied_up() -> None:
    table, seen = Table(), list[int | None]()
    a, b = candidate(table, "a"), candidate(table, "b")

    def tidy_up() -> None:
        b.step()
        seen.append(None if b.tenure is None else b.tenure.number)

    succession = Succession(a, lambda _: tidy_up)
    a.step()
    succession.follow()
    former = a.tenure
    succession.stop()
    assert seen == [3] and former is not None and not former.valid
    b.give_up()
    a.step()
    assert a.tenure is None, "one that ends does not lead again"


# -- in a real database ----------------------------------------------------------------------------------


@pytest.fixture
def url(postgres_url: str) -> str:
    """An empty database."""
    run(postgres_url, "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return postgres_url


def run(url: str, sql: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql)


@pytest.fixture
def tables(url: str) -> Iterator[tuple[PostgresLease, PostgresLease]]:
    """The lease over two connections, as two control planes have it."""
    pair = PostgresLease(url), PostgresLease(url)
    yield pair
    for one in pair:
        one.close()


A, B = LeaseHolder("a", "http://a", "here"), LeaseHolder("b", "http://b", "here")


def run_out(url: str) -> None:
    """As if the leader had been silent for the length of a lease."""
    run(url, "UPDATE lease_term SET until = clock_timestamp()")


def test_the_lease_in_postgres(url: str, tables: tuple[PostgresLease, PostgresLease]) -> None:
    a, b = tables
    assert a.leader() is None
    assert a.take(A) == 1 and b.take(B) is None
    assert a.renew(1) and b.leader() == Leader(1, A)
    run_out(url)
    assert b.leader() is None and b.take(B) == 2
    assert not a.renew(1)
    a.release(1)
    assert a.leader() == Leader(2, B), "the release of a lost lease changes nothing"
    b.release(2)
    assert not b.renew(2) and a.take(A) == 4


def test_nothing_is_written_under_a_lost_lease(url: str, tables: tuple[PostgresLease, PostgresLease]) -> None:
    a, b = tables
    former = Store(PostgresDatabase(url, Tenure(a.take(A) or 0, 0.0)))
    former.accept(make_record("a-1"), None, [])
    run_out(url)
    present = Store(PostgresDatabase(url, Tenure(b.take(B) or 0, 0.0)))
    writes: list[Callable[[], object]] = [
        lambda: former.accept(make_record("a-2"), None, []),
        lambda: former.save([make_record("a-1", reason="changed")]),
        lambda: former.set_setting("policy", "max-min"),
        lambda: former.add_token("digest", "ann", "admin", None),
        lambda: former._database.execute("DELETE FROM jobs"),
    ]
    for write in writes:
        with pytest.raises(NotLeading):
            write()
    assert former.jobs() == present.jobs() == [make_record("a-1")], "it may still read"
    present.accept(make_record("a-3"), None, [])
    former.close(), present.close()


def test_a_leader_frozen_inside_a_transaction_is_cut_off_and_nothing_of_it_is_kept(
    url: str, tables: tuple[PostgresLease, PostgresLease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swell.control.postgres._IDLE_S", 0.5)
    a, b = tables
    former = Store(PostgresDatabase(url, Tenure(a.take(A) or 0, 0.0)))
    taken: list[int | None] = []
    with pytest.raises(StoreUnavailable), former.transaction():
        former.accept(make_record("a-1"), None, [])
        run_out(url)
        thread = threading.Thread(target=lambda: taken.append(b.take(B)))
        thread.start()
        thread.join(60.0)  # this process says nothing meanwhile, as if it were frozen
        assert taken == [2]
        former.accept(make_record("a-2"), None, [])
    with pytest.raises(NotLeading):
        former.save([])
    present = Store(PostgresDatabase(url, Tenure(2, 0.0)))
    assert present.jobs() == []
    former.close(), present.close()


def test_a_store_of_one_control_plane_refuses_another_and_is_free_once_it_is_closed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swell.control.postgres._WIN_S", 0.0)
    one = Store(connect(url))
    assert one.leads and one.fence == 1
    with pytest.raises(StoreUnavailable, match="start all of them with --ha"):
        connect(url)
    run_out(url)
    wait_until(lambda: PostgresLease(url).leader() is not None, 30, "the lease to be renewed")
    one.close()
    Store(connect(url)).close()
