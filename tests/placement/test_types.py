import pytest

from swell.domain import Cluster, InputError
from swell.placement import PLACERS, NoRoom, make_placer

MIXED = Cluster.parse("2x4:t4,2x4:a100")


@pytest.fixture(params=sorted(PLACERS))
def placer(request):
    return make_placer(request.param, MIXED)


def types_of(placer, job):
    nodes = placer.cluster.nodes_of(placer.occupancy.held(job))
    return {placer.cluster.nodes[node].gpu_type for node in nodes}


def test_a_job_can_be_restricted_to_one_type(placer):
    placer.place({1: 6, 2: 6}, gpu_types={1: "a100", 2: "t4"})
    assert types_of(placer, 1) == {"a100"}
    assert types_of(placer, 2) == {"t4"}


def test_a_restricted_job_is_not_crowded_out_by_one_that_could_go_elsewhere(placer):
    placer.place({1: 8, 2: 8}, gpu_types={2: "t4"})
    assert types_of(placer, 1) == {"a100"}
    assert types_of(placer, 2) == {"t4"}


def test_types_are_mixed_only_where_none_has_room(placer):
    placer.place({1: 5})
    placer.place({2: 6})
    assert len(types_of(placer, 1)) == len(types_of(placer, 2)) == 1
    assert types_of(placer, 1) != types_of(placer, 2)
    placer.place({3: 4})
    assert types_of(placer, 3) == {"t4", "a100"}
    assert len(placer.occupancy.held(3)) == 4


def test_a_job_that_changes_stays_on_its_type(placer):
    placer.place({1: 2}, gpu_types={1: "a100"})
    placer.place({1: 4})
    assert types_of(placer, 1) == {"a100"}


def test_a_job_moves_when_its_type_changes_though_its_size_does_not(placer):
    placer.place({1: 2}, gpu_types={1: "a100"})
    assert placer.place({1: 2}, gpu_types={1: "a100"}) == {}
    placer.place({1: 2}, gpu_types={1: "t4"})
    assert types_of(placer, 1) == {"t4"}


def test_a_type_without_room_or_that_is_unknown_is_refused_whole(placer):
    with pytest.raises(NoRoom, match="9 GPUs of type 'a100'; 8 are free"):
        placer.place({1: 1, 2: 9}, gpu_types={2: "a100"})
    with pytest.raises(InputError, match="Did you mean 'a100'"):
        placer.place({1: 1, 2: 1}, gpu_types={2: "a10"})
    assert placer.occupancy.free_gpus == 16
