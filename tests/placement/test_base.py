""""""

from __future__ import annotations

import numpy as np
import pytest

from swell.domain import Cluster, InputError, Node
from swell.placement import DOWN, FREE, NoRoom, Occupancy


def test_take_and_release_move_gpus_between_a_job_and_the_free_ones():
    ledger = Occupancy(Cluster.parse("2x4"))
    ledger.take(7, (2, 3, 4))
    assert ledger.held(7) == (2, 3, 4)
    assert ledger.owner.tolist() == [FREE, FREE, 7, 7, 7, FREE, FREE, FREE]
    assert ledger.free.tolist() == [2, 3]
    assert ledger.free_gpus == 5
    assert ledger.crossing.tolist() == [1, 1]
    assert ledger.release(7) == (2, 3, 4)
    assert ledger.held(7) == ()
    assert (ledger.owner == FREE).all()
    assert ledger.free.tolist() == [4, 4]
    assert ledger.crossing.tolist() == [0, 0]


def test_a_held_gpu_is_refused_and_nothing_changes():
    ledger = Occupancy(Cluster.parse("2x4"))
    ledger.take(1, (0, 1))
    with pytest.raises(NoRoom, match="job 2 cannot take GPU 1: it is held by job 1"):
        ledger.take(2, (1, 2))
    assert ledger.held(2) == ()
    assert ledger.free.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("gpus", "message"), [((8,), "0 to 7"), ((-1, 0), "0 to 7"), ((3, 3), "named twice")]
)
def test_gpus_that_make_no_sense_are_refused(gpus, message):
    with pytest.raises(InputError, match=message):
        Occupancy(Cluster.parse("2x4")).take(0, gpus)


def test_a_job_takes_once_until_released():
    ledger = Occupancy(Cluster.parse("2x4"))
    ledger.take(1, (0,))
    with pytest.raises(NoRoom, match="already holds"):
        ledger.take(1, (1,))


def test_a_lost_node_takes_its_gpus_from_its_jobs_and_gives_them_back_free():
    cluster = Cluster.parse("3x2")
    ledger = Occupancy(cluster)
    ledger.take(1, (0, 1))
    ledger.take(2, (2,))
    ledger.take(3, (3, 4))
    assert ledger.set_cluster(cluster.with_node(1, up=False)) == [2, 3]
    assert ledger.held(1) == (0, 1)
    assert ledger.held(2) == ()
    assert ledger.held(3) == (4,)
    assert ledger.owner.tolist() == [1, 1, DOWN, DOWN, 3, FREE]
    assert ledger.free.tolist() == [0, 0, 1]
    assert ledger.crossing.tolist() == [0, 0, 0]
    with pytest.raises(NoRoom, match="out of service"):
        ledger.take(4, (2,))
    assert ledger.set_cluster(cluster) == []
    assert ledger.owner.tolist() == [1, 1, FREE, FREE, 3, FREE]
    assert ledger.free_gpus == 3


def test_gpus_in_other_hands_are_nobodys_to_take_and_come_back_free():
    cluster = Cluster.parse("2x4")
    ledger = Occupancy(cluster)
    ledger.take(1, (0, 1))
    ledger.take(2, (2, 3, 4))
    assert ledger.set_cluster(cluster.without([3, 7])) == [2]
    assert ledger.held(1) == (0, 1)
    assert ledger.held(2) == (2, 4)
    assert ledger.owner.tolist() == [1, 1, 2, DOWN, 2, FREE, FREE, DOWN]
    assert ledger.free.tolist() == [0, 2]
    with pytest.raises(NoRoom, match="out of service"):
        ledger.take(3, (7,))
    assert ledger.set_cluster(cluster) == []
    assert ledger.free_gpus == 4


def test_nodes_may_be_added_at_the_end_but_not_changed():
    cluster = Cluster.parse("2x2")
    ledger = Occupancy(cluster)
    ledger.take(1, (1, 2))
    assert ledger.set_cluster(Cluster((*cluster.nodes, Node("new", 4)))) == []
    assert ledger.free.tolist() == [1, 1, 4]
    assert np.array_equal(ledger.crossing, [1, 1, 0])
    with pytest.raises(InputError, match="keep their order"):
        ledger.set_cluster(Cluster.parse("2x4"))
