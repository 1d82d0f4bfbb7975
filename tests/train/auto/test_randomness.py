"""The randomness of an unmodified script: what all workers have in common, and what is a worker's own."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swell.train.auto.randomness import Randomness, StateNotes, job_seed, states
from swell.train.state import statetree

# ruff: noqa: NPY002 - the legacy generator is what scripts use


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The tests of other files have their generators as they were."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


class Here:
    """A pass."""


def _numbers() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def _worker(name: str, seed: int = 5) -> Randomness:
    randomness = Randomness(name)
    randomness.begin(seed)
    return randomness


def test_the_seed_of_a_job_is_decided_once_and_another_job_has_another(tmp_path: Path) -> None:
    first = job_seed(tmp_path / "a", "one", anew=True)
    assert job_seed(tmp_path / "a", "one", anew=False) == first
    assert job_seed(tmp_path / "a", "a later launch, from a checkpoint", anew=False) == first
    assert job_seed(tmp_path / "b", "two", anew=True) != first
    assert job_seed(tmp_path / "a", "a later launch, from the beginning", anew=True) != first


@pytest.mark.parametrize("text", ["", "no number", "9" * 5000])
def test_a_file_without_a_seed_or_one_that_cannot_be_written_still_gives_all_workers_one(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "seed").write_text(text)
    assert job_seed(tmp_path, "one", anew=False) == job_seed(tmp_path, "one", anew=False)
    (tmp_path / "file").touch()
    nowhere = tmp_path / "file" / "random"
    assert job_seed(nowhere, "one", anew=True) == job_seed(nowhere, "one", anew=False)


def test_all_workers_begin_with_the_same_numbers_and_another_job_with_others() -> None:
    drawn = []
    for name, seed in (("w0", 5), ("w1", 5), ("w0", 6)):
        _worker(name, seed)
        drawn.append(_numbers())
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[0], drawn[2]))


def test_generators_without_a_seed_are_alike_on_all_workers_and_differ_by_place_and_number() -> None:
    def script() -> list[Any]:
        out = []
        for _ in range(2):
            out.append(float(np.random.default_rng().random()))
            out.append(float(np.random.RandomState().rand()))
            out.append(random.Random().random())
            generator = torch.Generator()
            generator.seed()
            out.append(float(torch.rand((), generator=generator)))
        for reseed in (random.seed, np.random.seed, torch.seed):
            reseed()
            out += _numbers()
        return out

    runs = []
    for name, seed in (("w0", 5), ("w1", 5), ("w0", 6)):
        randomness = _worker(name, seed)
        with randomness.installed():
            runs.append(script())
    assert runs[0] == runs[1]
    assert not set(runs[0][:8]) & set(runs[2][:8])
    assert len(set(runs[0][:8])) == 8
    assert runs[0][-1] != runs[2][-1] and runs[0][-9] != runs[2][-9]


def test_a_generator_of_torch_is_one_whoever_made_it() -> None:
    before = torch.Generator()
    with _worker("w0").installed():
        made = torch.Generator().manual_seed(3)
        assert isinstance(before, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
        assert isinstance(made, type(before)) and not isinstance(3, torch.Generator)
        inside = torch.randperm(5, generator=made)
    assert torch.equal(inside, torch.randperm(5, generator=torch.Generator().manual_seed(3)))
    assert torch.Generator is type(before)


def test_what_is_meant_to_be_unique_stays_so() -> None:
    import tempfile

    unique = []
    for _ in range(2):
        with _worker("w0").installed():
            names = tempfile._RandomNameSequence()  # type: ignore[attr-defined]
            unique.append((next(names), uuid.uuid4(), os.urandom(8), random.SystemRandom().random()))
    assert all(a != b for a, b in zip(*unique))


def test_seeds_that_the_script_gives_count() -> None:
    with _worker("w0").installed():
        assert random.Random(3).random() == random.Random(3).random()
        random.seed(4)
        inside = random.random(), float(np.random.default_rng(4).random())
    random.seed(4)
    assert inside == (random.random(), float(np.random.default_rng(4).random()))


def test_a_workers_own_numbers_change_nothing_for_the_script_and_differ_from_the_others() -> None:
    after, inside = [], []
    for name, count in (("w0", 3), ("w1", 8)):
        randomness = _worker(name)
        _numbers()
        for _ in range(2):
            with randomness.own():
                inside.append((random.random(), float(np.random.rand()), *torch.rand(count).tolist()))
        after.append(_numbers())
    _worker("w0")
    _numbers()
    assert after == [_numbers()] * 2
    assert len(set(sum(inside, ()))) == 2 * (2 + 3) + 2 * (2 + 8), "nothing is drawn twice"


def test_a_newcomer_that_draws_one_batch_of_a_pass_goes_on_as_those_that_drew_all() -> None:
    between = []
    for batches in (7, 1):
        randomness, drawn = _worker("w0"), []
        for _ in range(3):
            here = Here()
            randomness.pass_begins(here)
            for _ in range(batches):
                torch.rand(4)
            with randomness.installed():
                for _ in range(batches):
                    np.random.default_rng()
                randomness.pass_ends(here, leads=True, forwarding=False)
                drawn.append([*_numbers(), float(np.random.default_rng().random())])
        between.append(drawn)
    assert between[0] == between[1]
    assert len({tuple(numbers) for numbers in between[0]}) == 3


def test_a_pass_without_randomness_leaves_a_script_where_a_plain_run_is() -> None:
    randomness, here = _worker("w0"), Here()
    randomness.pass_begins(here)
    randomness.pass_ends(here, leads=True, forwarding=False)
    after = _numbers()
    _worker("w0")
    assert after == _numbers()


def test_the_states_travel_to_newcomers_and_through_a_checkpoint() -> None:
    leader, here = _worker("w0"), Here()
    leader.pass_begins(here)
    _numbers()
    random.gauss(0.0, 1.0)
    np.random.randn()
    document, tensors = statetree.split(leader.capture(here))
    went_on = _numbers()
    leader.pass_ends(here, leads=True, forwarding=False)
    ended = _numbers()

    newcomer, there = _worker("w1", 77), Here()
    newcomer.pass_begins(there)
    torch.rand(3)
    newcomer.restore(there, statetree.join(document, tensors))
    assert _numbers() == went_on
    newcomer.pass_ends(there, leads=True, forwarding=False)
    assert _numbers() == ended


def test_states_of_an_older_checkpoint_change_nothing() -> None:
    randomness, here = _worker("w0"), Here()
    before = states()
    randomness.restore(here, {})
    assert torch.equal(before["torch"], states()["torch"]) and before["python"] == states()["python"]


def test_another_process_of_the_script_has_randomness_of_its_own() -> None:
    with _worker("w0").installed():
        found = []
        for _ in range(2):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(writing, repr(random.Random().random()).encode())
                os._exit(0)
            os.waitpid(pid, 0)
            found.append(os.read(reading, 100))
        assert found[0] != found[1]


def test_notes_of_several_leaders_are_read_as_they_come_and_without_what_was_cut_off(tmp_path: Path) -> None:
    random.gauss(0.0, 1.0)  # so that Python has another normal number in store
    first, reader = StateNotes(tmp_path / "passes"), StateNotes(tmp_path / "passes")
    assert reader.take(0) == {}
    noted = states()
    first.leave(0, noted)
    torch.rand(3)
    first.leave(2, {"torch": torch.get_rng_state()})
    found = reader.take(0)
    assert found["python"] == noted["python"] and found["numpy"].tobytes() == noted["numpy"].tobytes()
    assert torch.equal(found["torch"], noted["torch"]) and reader.take(1) == {}
    assert torch.equal(reader.take(2)["torch"], torch.get_rng_state())

    (file,) = (tmp_path / "passes").iterdir()
    whole = file.read_bytes()
    first.leave(3, noted)
    longer = file.read_bytes()
    for cut in (len(whole) + 5, len(longer) - 1):  # it died while it wrote
        file.write_bytes(longer[:cut])
        assert reader.take(3) == {} == StateNotes(tmp_path / "passes").take(3)
    second = StateNotes(tmp_path / "passes")  # the next leader makes passes 2 and 3 again
    random.random()
    second.leave(2, {"python": random.getstate()})
    second.leave(3, {"python": random.getstate()})
    for anybody in (reader, StateNotes(tmp_path / "passes")):
        assert anybody.take(2) == anybody.take(3) == {"python": random.getstate()}
