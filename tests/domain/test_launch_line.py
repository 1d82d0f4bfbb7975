"""Lines of other launchers: what they ask for, and what swell cannot do for them."""

from __future__ import annotations

import shlex

import pytest

from swell.domain import InputError
from swell.domain.launch_line import PROCESSES, LaunchLine, understand


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --nproc-per-node 8 train.py --lr 1", LaunchLine("train.py", ("--lr", "1"), 8)),
        ("torchrun --nproc_per_node=8 --nnodes=2 train.py", LaunchLine("train.py", (), 16)),
        ("/venv/bin/torchrun --standalone train.py --standalone", LaunchLine("train.py", ("--standalone",))),
        ("torchrun --nnodes 1:1 --rdzv-backend c10d --rdzv_endpoint=a:1 t.py", LaunchLine("t.py", ())),
        ("python -m torch.distributed.run --nproc-per-node=4 t.py -m", LaunchLine("t.py", ("-m",), 4)),
        (
            "python3 -u -m torch.distributed.launch --nproc_per_node 2 --master_port 1 t.py 3",
            LaunchLine("t.py", ("--local-rank=0", "3"), 2),
        ),
        ("python -m torch.distributed.launch --use_env t.py", LaunchLine("t.py", ())),
        ("python3.11 -u train.py --nproc-per-node 4", LaunchLine("train.py", ("--nproc-per-node", "4"))),
        ("accelerate launch train.py --lr 1", LaunchLine("train.py", ("--lr", "1"))),
        (
            "accelerate launch --num_processes 1 --mixed_precision=bf16 --cpu -- train.py",
            LaunchLine(
                "train.py", (), 1, {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "true"}
            ),
        ),
    ],
)
def test_a_line_of_another_launcher_is_taken_as_it_is(line: str, expected: LaunchLine) -> None:
    assert understand(shlex.split(line)) == expected


def test_the_workers_are_told_of_several_processes_and_of_nothing_else() -> None:
    assert LaunchLine("t.py", (), 8).environment == {PROCESSES: "8"}
    assert LaunchLine("t.py", (), 1).environment == {}


@pytest.mark.parametrize(
    "line", ["train.py --lr 1", "./train.sh", "python", "mpirun -n 4 t", "accelerate config"]
)
def test_what_is_no_line_of_a_launcher_stays_as_it_is(line: str) -> None:
    assert understand(shlex.split(line)) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torchrun --nproc-per-node gpu t.py", "--nproc-per-node must be a number of at least 1, got 'gpu'"),
        ("torchrun --nproc-per-node 0 t.py", "got '0'"),
        ("torchrun --nnodes 1:4 t.py", "--nnodes 1:4: give one number, not a range"),
        ("torchrun -m package.train", "-m: give the path of the script instead"),
        ("torchrun --no-python ./train.sh", "--no-python: give the path"),
        ("torchrun --gpus 4 t.py", "--gpus is no option that swell can take over"),
        ("torchrun --nproc-per-node", "needs a value"),
        ("torchrun --standalone", "there is no script in the line"),
        ("accelerate launch --num_processes 8 t.py", "Give --num_processes 1 and multiply"),
        ("accelerate launch --num_machines 2 t.py", "Give --num_processes 1 and multiply"),
        ("accelerate launch --use_deepspeed t.py", "--use_deepspeed is no option that swell can take over"),
    ],
)
def test_what_cannot_be_fulfilled_is_refused_with_what_to_type(line: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        understand(shlex.split(line))
    assert said in str(refused.value)
