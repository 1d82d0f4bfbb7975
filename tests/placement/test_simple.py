import pytest

from swell.domain import Cluster, InputError
from swell.placement import NoRoom, make_placer


def shapes(placer, placed):
    return {job: placer.cluster.shape(gpus) for job, gpus in placed.items()}


def test_most_free_takes_from_the_emptiest_node_first_then_the_next():
    placer = make_placer("most-free", Cluster.parse("3x4"))
    assert placer.place({1: 1}) == {1: (0,)}
    assert placer.place({2: 2}) == {2: (4, 5)}
    assert placer.place({3: 6}) == {3: (1, 2, 8, 9, 10, 11)}


def test_most_free_places_in_the_order_it_is_given():
    placer = make_placer("most-free", Cluster.parse("2x4"))
    assert placer.place({5: 1, 4: 2}) == {5: (0,), 4: (4, 5)}
    placer = make_placer("most-free", Cluster.parse("2x4"))
    assert placer.place({4: 2, 5: 1}) == {4: (0, 1), 5: (4,)}


def test_first_fit_keeps_a_job_on_the_first_node_that_holds_it():
    placer = make_placer("first-fit", Cluster.parse("3x4"))
    placer.place({1: 3})
    assert placer.place({2: 2}) == {2: (4, 5)}
    assert placer.place({3: 1}) == {3: (3,)}
    assert placer.place({4: 5}) == {4: (6, 7, 8, 9, 10)}


def test_packed_fills_the_fullest_node_that_has_room():
    placer = make_placer("packed", Cluster.parse("3x4"))
    placer.place({1: 3})
    placer.place({2: 2})
    assert placer.place({3: 1}) == {3: (3,)}
    assert placer.place({4: 4}) == {4: (8, 9, 10, 11)}


def test_packed_places_the_largest_first_so_that_they_are_not_split():
    placer = make_placer("packed", Cluster.parse("2x4"))
    assert placer.place({0: 2, 1: 3, 2: 3}) == {1: (0, 1, 2), 2: (4, 5, 6), 0: (3, 7)}


def test_packed_uses_the_fewest_nodes_and_leaves_emptier_ones_whole():
    placer = make_placer("packed", Cluster.parse("4x4"))
    placer.place_per_node({1: [2, 0, 0, 0]})
    assert placer.place({2: 6}) == {2: (2, 3, 4, 5, 6, 7)}
    assert placer.occupancy.free.tolist() == [0, 0, 4, 4]


def test_packed_avoids_nodes_where_another_job_crosses_already():
    placer = make_placer("packed", Cluster.parse("4x4"))
    placer.place_per_node({1: [2, 2, 0, 0], 2: [0, 0, 2, 0]})
    # Every choice takes two nodes; nodes 0 and 1 carry the traffic of job 1.
    assert placer.place({3: 6}) == {3: (10, 11, 12, 13, 14, 15)}


def test_packed_places_the_largest_change_first():
    placer = make_placer("packed", Cluster.parse("2x4"))
    placed = placer.place({1: 1, 2: 4, 3: 3})
    assert shapes(placer, placed) == {1: (1,), 2: (4,), 3: (3,)}


@pytest.mark.parametrize("name", ["packed", "most-free", "first-fit"])
def test_a_job_that_shrinks_keeps_gpus_it_had(name):
    placer = make_placer(name, Cluster.parse("1x8"))
    placer.place({1: 2})
    placer.place({2: 4})
    before = placer.occupancy.held(2)
    assert set(placer.place({2: 2})[2]) < set(before)


@pytest.mark.parametrize("name", ["packed", "most-free", "first-fit"])
def test_releases_come_before_takes_whatever_the_order(name):
    placer = make_placer(name, Cluster.parse("1x4"))
    placer.place({1: 4})
    assert placer.place({2: 4, 1: 0}) == {2: (0, 1, 2, 3), 1: ()}


@pytest.mark.parametrize("name", ["packed", "most-free", "first-fit"])
def test_too_many_gpus_are_refused_whole(name):
    placer = make_placer(name, Cluster.parse("2x4"))
    placer.place({1: 4})
    with pytest.raises(NoRoom, match="5 more GPUs are asked for than are given back, but only 4 are free"):
        placer.place({1: 5, 2: 4})
    assert placer.occupancy.jobs == {1: placer.occupancy.held(1)}
    assert len(placer.occupancy.held(1)) == 4


@pytest.mark.parametrize("changes", [{1: -1}, {-2: 1}])
def test_negative_shares_and_jobs_are_refused(changes):
    placer = make_placer("packed", Cluster.parse("2x4"))
    with pytest.raises(InputError, match="job number and GPUs must be at least 0"):
        placer.place({5: 1} | changes)
    assert placer.occupancy.free_gpus == 8


def test_an_unknown_placer_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match="Did you mean 'packed'"):
        make_placer("pack", Cluster.parse("2x4"))


def test_per_node_counts_are_carried_out_and_equal_ones_stay_put():
    placer = make_placer("packed", Cluster.parse("2x4"))
    assert placer.place_per_node({1: [1, 3], 2: [2, 0]}) == {1: (0, 4, 5, 6), 2: (1, 2)}
    assert placer.place_per_node({1: [1, 3], 2: [0, 1]}) == {2: (7,)}
    assert placer.place_per_node({1: [0, 0]}) == {1: ()}


def test_per_node_counts_beyond_a_node_are_refused_whole():
    placer = make_placer("packed", Cluster.parse("2x4"))
    placer.place_per_node({1: [3, 0]})
    with pytest.raises(NoRoom, match="node 'n0' has 1 GPUs too few"):
        placer.place_per_node({2: [2, 0]})
    with pytest.raises(InputError, match="each of the 2 nodes"):
        placer.place_per_node({2: [1, 0, 0]})
    assert placer.occupancy.free.tolist() == [1, 4]
