"""`--auto`: all workers of an unmodified script have the same data, random numbers and learning rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

# The scripts write their results with os.open, because what workers other than the leader write with open()
# goes to a private place.

BEGIN = """
    import json, os, random, sys, time
    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

    epochs, pace, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]

    def note(name, **found):
        worker = os.environ["SWELL_WORKER"]
        file = os.open(f"{folder}/{worker}-{os.getpid()}.{name}.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(file, json.dumps(found).encode())
        os.close(file)

    def numbers():
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

"""

SPLITS = (
    BEGIN
    + """
    def train_test_split(count, test_size):  # as sklearn does it
        order = np.random.mtrand._rand.permutation(count)
        return order[int(count * test_size):].tolist(), order[:int(count * test_size)].tolist()

    shuffled, by_numpy = list(range(1000)), np.arange(1000)
    random.shuffle(shuffled)
    np.random.shuffle(by_numpy)
    train, held_out = train_test_split(1000, 0.2)
    fresh = [int(np.random.default_rng().integers(10**9)), random.Random().randrange(10**9)]
    drop = np.random.RandomState().permutation(1000)[:5].tolist()
    words = list({f"word {i}" for i in range(50)})
    x = torch.randn(1000, 4)
    y = x.sum(1, keepdim=True)
    rest, other = random_split(range(1000), [0.8, 0.2])
    note("split", random=shuffled[:9], numpy=by_numpy[:9].tolist(), split=held_out, fresh=fresh, drop=drop,
         words=words, torch=list(other.indices)[:9], weights=x[0].tolist())

    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=40, shuffle=True)
    between = []
    for epoch in range(epochs):
        random.shuffle(shuffled)
        held = np.random.permutation(1000)[:3].tolist()
        between.append([shuffled[0], *held, *numbers(), float(np.random.default_rng().random())])
        for a, b in loader:
            time.sleep(pace)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
    between.append(numbers())
    note("end", between=between)
"""
)


def _auto(stage: Any, script: str, *arguments: str, **config: Any) -> Any:
    return stage.run(script, *arguments, settings={"auto": True}, **config)


def _noted(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"*.{name}.json"))]


def test_a_script_without_a_seed_has_one_split_and_one_order_on_all_workers(
    stage: Any, tmp_path: Path
) -> None:
    job = _auto(stage, SPLITS, "20", "0.003", str(tmp_path), workers=1)
    job.members(1)
    job.wait_for(lambda s: s["step"] >= 70)  # newcomers come in the fourth pass or later
    job.resize(3)
    job.members(3)
    killed = job.kill(1)
    job.wait_for(lambda s: killed not in s["members"] and len(s["members"]) == 3)
    assert job.wait() == 0, job.output()
    splits, ends = _noted(tmp_path, "split"), _noted(tmp_path, "end")
    assert len(splits) >= 4, "the one that was killed was replaced"
    assert len(ends) >= 3
    for name in splits[0]:
        assert all(one[name] == splits[0][name] for one in splits), name
    for passes in zip(*(one["between"] for one in ends)):
        assert all(drawn == passes[0] for drawn in passes)
    assert len({tuple(drawn) for drawn in ends[0]["between"]}) == 21, "each pass has numbers of its own"


def test_two_jobs_without_a_seed_have_different_randomness_and_the_same_order_of_sets(
    stage: Any, tmp_path: Path
) -> None:
    found = []
    for name, cold in (("forked", False), ("a new python", True)):
        (tmp_path / name).mkdir()
        job = _auto(stage, SPLITS, "1", "0", str(tmp_path / name), workers=1, cold=cold)
        assert job.wait() == 0, job.output()
        found += _noted(tmp_path / name, "split")
    assert [name for name in found[0] if found[0][name] == found[1][name]] == ["words"]


def test_a_job_that_goes_on_from_a_checkpoint_has_the_split_that_it_began_with(
    stage: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "job"
    for workers in (2, 1):
        job = _auto(stage, SPLITS, "30", "0.003", str(tmp_path), workers=workers, directory=directory)
        job.members(workers)
        if workers == 2:
            job.wait_for(lambda s: s["step"] >= 30)
            with job.client() as client:
                client._connection.request({"type": "stop", "save": True})
        assert job.wait() == 0, job.output()
    splits = _noted(tmp_path, "split")
    assert len(splits) == 3
    assert all(one == splits[0] for one in splits)


AUGMENTED = (
    BEGIN
    + """
    class Augmented(torch.utils.data.Dataset):
        def __len__(self):
            return 120

        def __getitem__(self, index):
            drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
            return torch.tensor([index, *drawn], dtype=torch.float64)

    processes = int(sys.argv[4])
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    critic = nn.Linear(3, 1).double()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, critic)]
    loader = DataLoader(Augmented(), batch_size=12, shuffle=True, num_workers=processes)
    between, seen = [], []
    for epoch in range(epochs):
        between.append(numbers())
        for batch in loader:
            time.sleep(pace)
            seen.append(batch[:, 1:].tolist())
            for one, optimizer in zip((model, critic), optimizers):
                noise = torch.randn(len(batch), 1, dtype=torch.float64)
                optimizer.zero_grad()
                (one(batch[:, 1:]) - noise).pow(2).mean().backward()
                optimizer.step()
    note("end", between=between, seen=[sample for batch in seen[-20:] for sample in batch])
"""
)


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=[pytest.mark.long, pytest.mark.gallery])])
def test_augmentation_and_what_is_drawn_between_passes_are_the_same_on_all_workers(
    stage: Any, tmp_path: Path, processes: int
) -> None:
    job = _auto(stage, AUGMENTED, "20", "0.003", str(tmp_path), str(processes), workers=1)
    job.members(1)
    job.wait_for(lambda s: s["step"] >= 60)
    job.resize(3)
    job.members(3)
    assert job.wait() == 0, job.output()
    ends = _noted(tmp_path, "end")
    assert len(ends) == 3
    for drawn in zip(*(end["between"] for end in ends)):
        assert all(one == drawn[0] for one in drawn)
    for position in range(3):  # of random, of numpy, of torch
        seen = [[sample[position] for sample in end["seen"]] for end in ends]
        assert seen[0] == seen[1] == seen[2], "all workers have the whole batch"
        assert len(set(seen[0])) == len(seen[0]) > 200, "no two samples were augmented with the same numbers"
    assert job.events("differs") == []


PLATEAU = (
    BEGIN
    + """
    torch.manual_seed(3)
    x = torch.randn(300, 4)
    y = x.sum(1, keepdim=True) + torch.randn(300, 1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.01)
    loader = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)
    rates, steps = {}, 0
    for epoch in range(epochs):
        total = 0.0
        for a, b in loader:
            time.sleep(pace)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()
            rates[steps] = optimizer.param_groups[0]["lr"]
            optimizer.step()
            steps += 1
            total += loss.item()
        scheduler.step(total / len(loader))
    weights = [p.flatten().tolist() for p in model.parameters()]
    note("end", rates=rates, weights=sum(weights, []), leads=os.environ["SWELL_WORKER"] == "w0")
"""
)


def test_a_plateau_of_the_training_loss_gives_all_workers_the_leaders_learning_rates(
    stage: Any, tmp_path: Path
) -> None:
    job = _auto(stage, PLATEAU, "40", "0.003", str(tmp_path), workers=3)
    job.members(3)
    assert job.wait() == 0, job.output()
    ends = _noted(tmp_path, "end")
    assert len(ends) == 3
    leader = next(end for end in ends if end["leads"])
    assert leader["rates"]["399"] < 0.02, "the rate was reduced several times"
    for end in ends:
        assert end["rates"] == {step: leader["rates"][step] for step in end["rates"]}
        assert end["weights"] == leader["weights"]
    assert not job.events("differs"), "the training loss is that of the whole batch"


STOPS_EARLY = (
    BEGIN
    + """
    torch.manual_seed(3)
    x = torch.randn(300, 4)
    y = x.sum(1, keepdim=True)
    width = int(sys.argv[6])
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)
    best, bad, epoch, last = 1e9, 0, 0, epochs
    if os.environ["SWELL_WORKER"] == sys.argv[4]:
        last = int(sys.argv[5])  # as if the losses of its parts had said so
    while epoch < last:
        for a, b in loader:
            time.sleep(pace)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
        epoch += 1
    print("ended after", epoch, flush=True)
    note("end", epoch=epoch)
"""
)


@pytest.mark.parametrize(
    ("who", "ends", "width"),
    [("w0", 6, 8), ("w0", 6, 100_000), ("w1", 16, 100_000)],  # gradients in one exchange, or in pieces
)
def test_the_leader_decides_when_the_script_stops(
    stage: Any, tmp_path: Path, who: str, ends: int, width: int
) -> None:
    job = _auto(stage, STOPS_EARLY, "16", "0.003", str(tmp_path), who, "6", str(width), workers=2)
    job.members(2)
    assert job.wait() == 0, job.output()
    assert job.output().count("ended after") == 1
    assert f"ended after {ends}" in job.output()


DIFFERS = (
    BEGIN
    + """
    torch.manual_seed(3)
    x = torch.randn(300, 4)
    y = x.sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)
    steps = 0
    for epoch in range(epochs):
        for a, b in loader:
            time.sleep(pace)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
            steps += 1
            if steps == 60 and os.environ["SWELL_WORKER"] == "w1":
                with torch.no_grad():
                    model[2].weight[0, 3] += 1e-4
    weights = [p.flatten().tolist() for p in model.parameters()]
    note("end", weights=sum(weights, []))
"""
)


def test_a_worker_whose_weights_differ_is_replaced_within_fifty_steps(stage: Any, tmp_path: Path) -> None:
    job = _auto(stage, DIFFERS, "40", "0.003", str(tmp_path), workers=2)
    job.members(2)
    job.wait_for(lambda s: s["step"] >= 300)
    job.members(2)
    assert job.wait() == 0, job.output()
    (said,) = job.events("differs")
    assert said["worker"] == "w1" and said["then"] == "it is replaced" and 60 <= said["step"] <= 110
    assert said["what"].endswith("2.weight")
    ends = _noted(tmp_path, "end")
    assert len(ends) == 2 and ends[0] == ends[1]
