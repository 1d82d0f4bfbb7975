"""What a submission or a quote is answered, and how a finish is estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.control.conftest import make_record
from tests.control.virtual import Exact, known_exactly

from swell.control import promises
from swell.control.book import Book
from swell.control.knowledge import Knowledge, Timings
from swell.control.model import JobRecord, Phase
from swell.control.scheduler import Scheduler
from swell.control.store import Store, connect
from swell.domain import Cluster, Event, EventKind
from swell.perf.length import TargetLength
from swell.perf.sharing import LEAST_OF_SHARE

NOW_S = 1000.0
RATES = np.array([0.0, 1.0, 1.8, 2.4, 2.8])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(connect(str(tmp_path / "store.db")))
    yield opened
    opened.close()


def exact(work: float, *, startup_s: float = 0.0, closing_s: float = 0.0) -> Exact:
    return known_exactly("kind", work, RATES, startup_s=startup_s, pause_s=0.0, closing_s=closing_s)


def desk(store: Store, policy: str = "elasticflow", round_s: float | None = None) -> Scheduler:
    return Scheduler(Book(store), policy, Cluster.parse("1x4"), round_s)


def record(job_id: str = "a", deadline_s: float | None = None, **more: object) -> JobRecord:
    return make_record(job_id, request={"deadline_s": deadline_s}, submitted_s=NOW_S, **more)


def test_a_deadline_that_can_be_kept_is_guaranteed(store: Store) -> None:
    promise, asked = promises.promise(record(deadline_s=NOW_S + 200), exact(100.0), desk(store), NOW_S)
    assert (promise.admitted, promise.pending, promise.guaranteed_s) == (True, False, NOW_S + 200)
    assert asked is not None and asked.admission.admitted


def test_a_deadline_that_cannot_be_kept_is_refused_with_one_that_can(store: Store) -> None:
    known = exact(1000.0, startup_s=3.0, closing_s=2.0)
    scheduler = desk(store)
    promise, asked = promises.promise(record(deadline_s=NOW_S + 100), known, scheduler, NOW_S)
    assert not promise.admitted and asked is None and "even alone on the cluster" in promise.reason
    assert promise.earliest_deadline_s is not None
    again, _ = promises.promise(record(deadline_s=promise.earliest_deadline_s), known, scheduler, NOW_S)
    assert again.admitted


def test_where_slots_share_a_gpu_a_promise_counts_on_neighbours_that_fill_it(store: Store) -> None:
    parsed = Cluster.parse("1x4")
    shared = Cluster(tuple(replace(node, per_gpu=4) for node in parsed.nodes))
    known, earliest_s = exact(1000.0), []
    for cluster in (parsed, shared):
        scheduler = Scheduler(Book(store), "elasticflow", cluster)
        promise, _ = promises.promise(record(deadline_s=NOW_S + 1), known, scheduler, NOW_S)
        assert promise.earliest_deadline_s is not None
        earliest_s.append(promise.earliest_deadline_s - NOW_S)
    least = LEAST_OF_SHARE / 4  # a job may have a little less than its share
    assert earliest_s[1] == pytest.approx(earliest_s[0] / least, rel=0.01)
    scheduler = Scheduler(Book(store), "elasticflow", shared)
    guess = promises.estimated(record(), known, scheduler, NOW_S)
    assert guess.finish_s == pytest.approx(NOW_S + 1000.0 / RATES[4]), "an estimate says what is likely"


def test_a_deadline_of_a_script_that_nobody_has_seen_is_answered_later(store: Store) -> None:
    promise, asked = promises.promise(record(deadline_s=NOW_S + 100), Knowledge("new"), desk(store), NOW_S)
    assert (promise.admitted, promise.pending, asked) == (True, True, None)


def test_a_policy_that_gives_no_guarantees_says_so(store: Store) -> None:
    late = record(deadline_s=NOW_S + 1)
    promise, asked = promises.promise(late, exact(1e6), desk(store, "afs-l"), NOW_S)
    assert (promise.admitted, promise.guaranteed_s, asked) == (True, None, None)
    assert "gives no guarantees" in promise.reason


def test_a_length_that_is_only_predicted_is_never_promised(store: Store) -> None:
    known = exact(10.0)
    known.length.target = TargetLength(0.3)
    promise, _ = promises.promise(record(deadline_s=NOW_S + 1e6), known, desk(store), NOW_S)
    assert (promise.admitted, promise.reason) == (False, promises.PREDICTED)
    promise, _ = promises.promise(record(), known, desk(store), NOW_S)
    assert promise.admitted and promise.estimate.finish_s is not None


def test_what_was_promised_before_counts(store: Store) -> None:
    scheduler = desk(store)
    first, known = record("a", deadline_s=NOW_S + 50), exact(130.0)
    promise, asked = promises.promise(first, known, scheduler, NOW_S)
    assert promise.admitted and asked is not None
    scheduler.book.add(
        make_record("a", request={"deadline_s": NOW_S + 50}, submitted_s=NOW_S, promise=promise), known
    )
    scheduler.add(scheduler.book.records["a"], NOW_S)
    scheduler.accepted(asked)
    second, _ = promises.promise(record("b", deadline_s=NOW_S + 50), exact(130.0), scheduler, NOW_S)
    assert not second.admitted


def test_estimates_follow_the_policy_and_what_is_ahead(store: Store) -> None:
    scheduler = desk(store, "fifo")
    alone = promises.estimated(record("b"), exact(100.0), scheduler, NOW_S)
    assert alone.finish_s == pytest.approx(NOW_S + 100.0)
    for name in "wxyz":
        scheduler.book.add(record(name), exact(40.0))
    behind = promises.estimated(record("b"), exact(100.0), scheduler, NOW_S)
    assert behind.finish_s == pytest.approx(NOW_S + 140.0)
    assert behind.earliest_s is not None and behind.latest_s is not None
    assert behind.earliest_s <= behind.finish_s <= behind.latest_s


def test_estimates_wait_for_the_round_that_is_next(store: Store) -> None:
    scheduler = desk(store, "fifo", round_s=60.0)
    guess = promises.estimated(record("b"), exact(100.0), scheduler, 1030.0)
    assert guess.finish_s == pytest.approx(1080.0 + 100.0)


def test_a_job_under_way_has_only_the_rest_ahead(store: Store) -> None:
    running = record("a", phase=Phase.RUNNING, wanted=(0,), held=(0,), done=75.0)
    guess = promises.estimated(running, exact(100.0), desk(store, "fifo"), NOW_S)
    assert guess.finish_s == pytest.approx(NOW_S + 25.0)


def test_a_job_that_lost_slots_with_a_node_and_has_not_moved_yet_is_estimated_too(store: Store) -> None:
    scheduler = desk(store, "fifo")
    running = record("a", phase=Phase.RUNNING, wanted=(0, 1, 2, 3), held=(0, 1, 2, 3), done=75.0)
    scheduler.set_cluster(scheduler.cluster.without([1, 2, 3]), NOW_S)
    assert promises.estimated(running, exact(100.0), scheduler, NOW_S).finish_s is not None


def test_a_crowd_gets_a_rough_estimate(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("no simulation for a crowd")

    monkeypatch.setattr(promises, "simulate", never)
    guess = promises.estimated(record("b"), exact(100.0), desk(store), NOW_S, quick=True)
    assert guess.finish_s == pytest.approx(NOW_S + 100.0 / RATES[4])


def test_the_book_writes_before_it_tells(store: Store) -> None:
    book = Book(store)
    store.accept(record("a"), None, [])
    heard: list[tuple[int, int]] = []
    stop = book.subscribe(lambda seq, event: heard.append((seq, store.last_seq())))
    book.write([], [Event(1.0, EventKind.PROGRESS, job_id="a")])
    assert heard == [(1, 1)], "on disk before anybody hears of it"
    stop()
    book.write([], [Event(2.0, EventKind.PROGRESS, job_id="a")])
    assert len(heard) == 1 and book.subscribers == 0


def test_a_subscriber_that_fails_harms_nobody_and_is_in_the_log(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    book, heard = Book(store), []
    failing = True

    def broken(seq: int, event: Event) -> None:
        if failing:
            raise RuntimeError("mine alone")

    book.subscribe(broken)
    book.subscribe(lambda seq, event: heard.append(seq))
    for _ in range(3):
        book.write([], [Event(1.0, EventKind.PROGRESS, job_id="a")])
    assert heard == [1, 2, 3]
    assert caplog.text.count("a subscriber failed") == caplog.text.count("RuntimeError: mine alone") == 1
    failing = False
    book.write([], [Event(1.0, EventKind.PROGRESS, job_id="a")])
    failing = True
    book.write([], [Event(1.0, EventKind.PROGRESS, job_id="a")])
    assert caplog.text.count("a subscriber failed") == 2, "it had worked in between"


def test_a_script_with_other_arguments_has_a_rough_estimate_and_no_guarantee(store: Store) -> None:
    known = Knowledge("kind", kin=exact(100.0))
    assert known.kin is not None
    known.kin.source = "kin"
    guess = promises.promise(record(), known, desk(store), NOW_S)[0].estimate
    assert guess.source == "kin" and guess.finish_s is not None
    assert guess.earliest_s == NOW_S and guess.latest_s is not None
    assert guess.latest_s > 1.9 * guess.finish_s - 0.9 * NOW_S, "at least twice as long is possible"
    promise, asked = promises.promise(record(deadline_s=NOW_S + 10_000), known, desk(store), NOW_S)
    assert promise.pending and promise.guaranteed_s is None and asked is None


@pytest.mark.parametrize(
    ("auto", "advice"), [(True, "run it once without a deadline"), (False, "job.epochs")]
)
def test_a_deadline_refused_for_an_unknown_length_says_what_to_do(
    store: Store, auto: bool, advice: str
) -> None:
    job = make_record("a", request={"deadline_s": NOW_S + 200, "auto": auto}, started_s=NOW_S)
    known = Knowledge("kind", timings=Timings(seen={(1, 1, 8): 3}))
    refusal, _ = promises.after_profiling(job, known, desk(store), NOW_S)
    assert not refusal.admitted and advice in refusal.reason
