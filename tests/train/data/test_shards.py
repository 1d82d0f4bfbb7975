"""The queue of shards: committed samples count exactly once, whoever dies, wakes, joins or restarts."""

import json
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swell.train.data.shards import Consumed, Lease, ShardQueue, StaleLease


def test_every_shard_is_leased_once_and_the_epoch_ends_when_all_are_done() -> None:
    queue = ShardQueue(5, seed=3)
    leases = [queue.lease("w0") for _ in range(5)]
    assert sorted(lease.shard for lease in leases if lease) == [0, 1, 2, 3, 4]
    assert queue.lease("w1") is None
    assert not queue.epoch_done, "leased is not done"
    queue.commit([Consumed(lease.token, 7, finished=True) for lease in leases if lease])
    assert queue.epoch_done
    assert queue.committed == 35


def test_a_lost_workers_shard_comes_back_first_with_its_committed_offset() -> None:
    queue = ShardQueue(3, shuffle=False)
    lease = queue.lease("dies")
    assert lease is not None
    queue.commit([Consumed(lease.token, 10)])
    assert queue.lost("dies") == [0]
    again = queue.lease("lives")
    assert again is not None
    assert (again.shard, again.offset) == (0, 10)
    assert again.token != lease.token


def test_a_worker_that_wakes_up_cannot_report_under_its_old_lease() -> None:
    queue = ShardQueue(1)
    old = queue.lease("frozen")
    assert old is not None
    queue.lost("frozen")
    new = queue.lease("frozen")
    assert new is not None
    with pytest.raises(StaleLease, match="lease again"):
        queue.commit([Consumed(new.token, 1), Consumed(old.token, 1)])
    assert queue.committed == 0, "a refused step leaves no trace of its valid half"


def test_a_step_may_finish_one_shard_and_begin_the_next() -> None:
    queue = ShardQueue(2, shuffle=False)
    a, b = queue.lease("w"), queue.lease("w")
    assert a is not None and b is not None
    queue.commit([Consumed(a.token, 3, finished=True), Consumed(b.token, 5)])
    assert [lease.offset for lease in queue.held_by("w")] == [5]
    assert queue.committed == 8


def test_samples_after_the_end_of_a_shard_are_refused() -> None:
    queue = ShardQueue(2)
    a = queue.lease("w")
    assert a is not None
    with pytest.raises(StaleLease):
        queue.commit([Consumed(a.token, 3, finished=True), Consumed(a.token, 1)])
    assert queue.committed == 0


def test_epochs_differ_in_order_and_seeds_repeat_it() -> None:
    def order(seed: int, epochs: int) -> list[list[int]]:
        queue, out = ShardQueue(20, seed=seed), []
        for _ in range(epochs):
            leases = [lease for _ in range(20) if (lease := queue.lease("w"))]
            out.append([lease.shard for lease in leases])
            queue.commit([Consumed(lease.token, 1, finished=True) for lease in leases])
            queue.next_epoch()
        return out

    first = order(1, 3)
    assert first == order(1, 3)
    assert first != order(2, 3)
    assert first[0] != first[1]


def test_next_epoch_waits_for_the_last_shard() -> None:
    queue = ShardQueue(2)
    with pytest.raises(RuntimeError, match="2 of 2 shards"):
        queue.next_epoch()


def test_retain_gives_back_the_shards_of_all_others() -> None:
    queue = ShardQueue(4, shuffle=False)
    for holder in "abc":
        queue.lease(holder)
    assert queue.retain({"b"}) == [0, 2]
    assert [lease.shard for _ in range(3) if (lease := queue.lease("x"))] == [0, 2, 3]


@pytest.mark.parametrize("shards", [0, -1])
def test_no_shards_is_refused(shards: int) -> None:
    with pytest.raises(ValueError, match="shards"):
        ShardQueue(shards)


def test_negative_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="samples"):
        Consumed(0, -1)


def test_another_data_sets_state_is_refused() -> None:
    with pytest.raises(ValueError, match="the saved queue has 3, this data set 4"):
        ShardQueue(4).load_state_dict(ShardQueue(3).state_dict())


class Stream(RuleBasedStateMachine):
    """Workers that read ahead, commit, die, wake up and restart, against the list of samples."""

    @initialize(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), seed=st.integers(0, 9))
    def begin(self, lengths: list[int], seed: int) -> None:
        self.lengths = lengths
        self.queue = ShardQueue(len(lengths), seed=seed)
        self.workers: dict[str, dict[int, Lease]] = {}
        self.stale: list[int] = []
        self.counts: Counter[tuple[int, int]] = Counter()
        self.saved: tuple[str, Counter[tuple[int, int]], int] | None = None
        self.names = 0

    @rule()
    @precondition(lambda self: len(self.workers) < 4)
    def join(self) -> None:
        self.workers[f"w{self.names}"] = {}
        self.names += 1

    @rule(data=st.data())
    @precondition(lambda self: self.workers)
    def take(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        lease = self.queue.lease(name)
        if lease is not None:
            self.workers[name][lease.token] = lease

    @rule(data=st.data())
    @precondition(lambda self: any(self.workers.values()))
    def step(self, data: st.DataObject) -> None:
        """One committed step: each worker reads up to four samples across the shards it holds."""
        entries = []
        used: list[tuple[int, int]] = []
        for name in sorted(self.workers):
            budget = data.draw(st.integers(0, 4))
            for lease in self.queue.held_by(name):
                length = self.lengths[lease.shard]
                taken = min(budget, length - lease.offset)
                budget -= taken
                finished = lease.offset + taken == length and data.draw(st.booleans())
                used += [(lease.shard, lease.offset + i) for i in range(taken)]
                entries.append(Consumed(lease.token, taken, finished))
                if finished:
                    del self.workers[name][lease.token]
                    self.stale.append(lease.token)
        self.queue.commit(entries)
        self.counts.update(used)

    @rule(data=st.data())
    @precondition(lambda self: self.workers)
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.workers)))
        tokens = self.workers.pop(name)
        self.queue.lost(name)
        self.stale += tokens

    @rule(data=st.data())
    @precondition(lambda self: self.stale)
    def wake(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(self.stale))
        before = self.queue.state_dict()
        with pytest.raises(StaleLease):
            self.queue.commit([Consumed(token, 1)])
        assert self.queue.state_dict() == before

    @rule()
    def checkpoint(self) -> None:
        self.saved = (json.dumps(self.queue.state_dict()), self.counts.copy(), self.names)

    @rule()
    @precondition(lambda self: self.saved is not None)
    def restart_from_checkpoint(self) -> None:
        assert self.saved is not None
        text, counts, _ = self.saved
        self.queue = ShardQueue(len(self.lengths))
        self.queue.load_state_dict(json.loads(text))
        self.queue.retain(())
        self.counts = counts.copy()
        self.workers = {}
        self.stale = []

    @rule()
    def finish_epoch(self) -> None:
        """Whatever happened before, one diligent worker ends the epoch, and each sample was used once."""
        for name in sorted(self.workers):
            self.stale += self.workers.pop(name)
            self.queue.lost(name)
        while (lease := self.queue.lease("last")) is not None:
            left = self.lengths[lease.shard] - lease.offset
            self.counts.update((lease.shard, lease.offset + i) for i in range(left))
            self.queue.commit([Consumed(lease.token, left, finished=True)])
            self.stale.append(lease.token)
        assert self.queue.epoch_done
        assert self.counts == Counter({(s, i): 1 for s, n in enumerate(self.lengths) for i in range(n)})
        self.queue.next_epoch()
        self.counts.clear()
        self.saved = None

    @invariant()
    def committed_samples_are_counted_once(self) -> None:
        assert self.queue.committed == sum(self.counts.values())
        assert all(times == 1 for times in self.counts.values())


TestStream = Stream.TestCase
TestStream.settings = settings(max_examples=80, stateful_step_count=40)
