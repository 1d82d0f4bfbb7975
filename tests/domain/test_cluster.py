"""Clusters: parsing, numbering of GPUs, loss of nodes."""

import pytest

from swell.domain import Cluster, InputError, Node, overlapping, packed_shape


def test_parse_numbers_gpus_in_node_order() -> None:
    cluster = Cluster.parse("2x4:t4,1x8:a100")
    assert cluster.capacity == 16
    assert cluster.gpu_types == ("t4", "a100")
    assert cluster.first_gpu.tolist() == [0, 4, 8, 16]
    assert cluster.node_of_gpu.tolist() == [0] * 4 + [1] * 4 + [2] * 8
    assert str(cluster) == "2x4:t4,1x8:a100"


def test_untyped_cluster_reads_back_as_written() -> None:
    assert str(Cluster.parse("16x4")) == "16x4"


@pytest.mark.parametrize("text", ["0x4", "4x0", "4", "x", "", "4x4,", "-1x4", "4x4:", "4x4x4", "axb"])
def test_nonsense_is_refused_with_the_field_and_an_example(text: str) -> None:
    with pytest.raises(InputError, match="16x4") as caught:
        Cluster.parse(text)
    assert caught.value.field == "cluster"
    assert text in str(caught.value)


def test_a_lost_node_keeps_its_numbers_but_gives_no_capacity() -> None:
    cluster = Cluster.parse("3x4")
    lost = cluster.with_node(1, up=False)
    assert lost.capacity == 8
    assert lost.node_gpus.tolist() == [4, 0, 4]
    assert lost.node_of_gpu.tolist() == cluster.node_of_gpu.tolist()
    assert lost.with_node(1, up=True) == cluster


def test_gpus_in_other_hands_give_no_capacity() -> None:
    cluster = Cluster.parse("2x4").without([1, 2, 5]).with_node(1, up=False)
    assert cluster.node_gpus.tolist() == [2, 0]
    assert cluster.capacity == 2
    assert cluster.in_service.tolist() == [True, False, False, True] + [False] * 4
    with pytest.raises(InputError, match="0 to 7"):
        cluster.without([8])


def test_shape_counts_gpus_per_node() -> None:
    cluster = Cluster.parse("3x4")
    assert cluster.shape((0,)) == (1,)
    assert cluster.shape((0, 1, 4, 8, 9, 10)) == (2, 1, 3)
    assert cluster.nodes_of((0, 1, 8)) == {0, 2}


def test_packed_shape_fills_nodes_first() -> None:
    assert packed_shape(3, 4) == (3,)
    assert packed_shape(8, 4) == (4, 4)
    assert packed_shape(10, 4) == (4, 4, 2)


def test_overlap_is_found() -> None:
    assert overlapping([(0, 1), (2, 3)]) is None
    assert overlapping([(0, 1), (1, 2)]) == 1


def test_a_node_without_gpus_is_refused() -> None:
    with pytest.raises(InputError, match="gpus must be at least 1, got 0"):
        Node("n0", 0)
    with pytest.raises(InputError):
        Cluster(())
