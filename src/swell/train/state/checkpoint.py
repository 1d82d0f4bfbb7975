"""Checkpoints that training does not wait for and that a crash cannot damage.

    root/step-000000001200/       one directory per checkpoint, complete or absent
        .metadata, __0_0.distcp   the tensors in torch's distributed checkpoint (DCP) format
        state.json                everything that is not a tensor (see `statetree`)
        manifest.json             step, and size and SHA-256 of every file above
    root/.writing-*               a save under way, or what a crash left of one; removed at the next start
    root/damaged-step-*           the newest checkpoint that failed its checksums, kept for a look

*Asynchronous*: `save` copies the state into host memory that is allocated once, and returns; a thread writes
it. While it is still writing, another `save` is skipped rather than queued. *Atomic*: a checkpoint gets its
name by a rename, after files and directories have been synced. *Checked*: a checkpoint whose files do not
match its manifest is set aside, and the one before is used. *Never fatal*: a full disk costs the checkpoint,
not the training.

The tensors can be read without swell, under their dotted path:

    state = {"model": model.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id="root/step-000000001200")

On pickle: DCP's `.metadata` is a pickle, and torch unpickles it when loading. swell writes no other pickle
(tensors are loaded with `weights_only`, the rest is JSON). The checksums find accidents, not forgery: load a
checkpoint only from a place from which you would also run a script.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from swell.train.agent.regular import sync_directory, write_synced
from swell.train.state import statetree

log = logging.getLogger(__name__)

FORMAT = 1
_NAME = re.compile(r"step-(\d{12})")
_WRITING, _DAMAGED = ".writing-", "damaged-"


Allocate = Callable[[str, torch.dtype, tuple[int, ...]], Tensor]
"""Memory for a tensor of a checkpoint, given its name, type and shape."""


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message names it and the reason."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that passed its checksums."""

    step: int
    state: Any
    path: Path


class Checkpointer:
    """Saves and loads the checkpoints of one job under one directory; one writer at a time."""

    def __init__(self, root: str | os.PathLike[str], *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep: got {keep}, must be at least 1")
        self._root = Path(root)
        self._keep = keep
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self.last_saved_step: int | None = None
        self.last_error: str | None = None
        self.skipped = 0
        self._clear_leftovers()

    def save(self, step: int, state: Any, *, wait: bool = False) -> bool:
        """Copy `state` to host memory and write it in the background; False if the last save is still being
        written.

        With `wait` the call returns when the checkpoint is on disk (or has failed: see `last_error`).
        A state that `statetree` cannot take apart is refused before anything is written.
        """
        if step < 0:
            raise ValueError(f"step: got {step}, must be at least 0")
        if self.saving:
            if not wait:
                self.skipped += 1
                log.debug("checkpoint of step %d skipped: the one before is still being written", step)
                return False
            self.wait()
        document, tensors = statetree.split(state)
        text = json.dumps({"format": FORMAT, "state": document}, allow_nan=False)
        host = self._snapshot(tensors)
        self._thread = threading.Thread(
            target=self._write, args=(step, text, host), name=f"swell-checkpoint-{step}", daemon=True
        )
        self._thread.start()
        if wait:
            self.wait()
        return True

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written right now."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the save in progress; False if it did not end in time."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.saving

    def load_newest(self, where: Allocate | None = None) -> Loaded | None:
        """The newest undamaged checkpoint, or None; damaged ones are set aside, which is logged."""
        self.wait()
        for path in reversed(list_checkpoints(self._root)):
            try:
                return load(path, where)
            except (CheckpointError, OSError) as error:
                log.error(
                    "checkpoint %s cannot be used (%s); falling back to the one before", path.name, error
                )
                self._set_aside(path)
        return None

    def _snapshot(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        host: dict[str, Tensor] = {}
        on_device = False
        for key, tensor in tensors.items():
            buffer = self._host.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                # Pinned memory, because the copy from a GPU is otherwise neither fast nor asynchronous.
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffer.copy_(tensor, non_blocking=True)
            on_device |= tensor.is_cuda
            host[key] = buffer
        if on_device:
            torch.cuda.synchronize()
        self._host = host  # this frees the buffers of tensors that no longer exist
        return host

    def _write(self, step: int, text: str, tensors: dict[str, Tensor]) -> None:
        start = time.perf_counter()
        target = self._root / f"step-{step:012d}"
        partial = self._root / f"{_WRITING}{target.name}-{os.getpid()}"
        try:
            partial.mkdir(parents=True)
            _write_tensors(partial, tensors)
            write_synced(partial / "state.json", text.encode())
            files = {path.name: _fingerprint(path) for path in sorted(partial.iterdir())}
            write_synced(partial / "manifest.json", _manifest(step, files))
            sync_directory(partial)
            self._publish(partial, target)
        except Exception as error:  # training must go on whatever fails here
            self.last_error = _explain(error, self._root)
            log.error("checkpoint of step %d not saved, training goes on: %s", step, self.last_error)
            shutil.rmtree(partial, ignore_errors=True)
            return
        self.last_error = None
        self.last_saved_step = step
        log.info("checkpoint of step %d saved in %.2f s", step, time.perf_counter() - start)
        self._prune()

    def _publish(self, partial: Path, target: Path) -> None:
        if target.exists():
            # The step was saved before. Two renames are not atomic together, so an undamaged checkpoint is
            # not replaced: it would be missing for a moment.
            with contextlib.suppress(CheckpointError):
                verify(target)
                shutil.rmtree(partial)
                return
            self._set_aside(target)
        partial.rename(target)
        sync_directory(self._root)

    def _prune(self) -> None:
        for path in list_checkpoints(self._root)[: -self._keep]:
            # Rename first, so that an interrupted deletion does not leave a checkpoint with half its files.
            doomed = self._root / f"{_WRITING}old-{path.name}-{os.getpid()}"
            with contextlib.suppress(OSError):
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def _set_aside(self, path: Path) -> None:
        for older in self._root.glob(f"{_DAMAGED}*"):
            shutil.rmtree(older, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.rename(self._root / f"{_DAMAGED}{path.name}")

    def _clear_leftovers(self) -> None:
        if self._root.is_dir():
            for path in self._root.glob(f"{_WRITING}*"):
                shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """Directories of complete checkpoints under `root`, oldest first; their contents are not checked."""
    root = Path(root)
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def verify(path: str | os.PathLike[str]) -> int:
    """Check a checkpoint against its manifest; returns its step, or raises CheckpointError."""
    path = Path(path)
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        seal = manifest.pop("seal")
        step, files = int(manifest["step"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"manifest.json is missing or unreadable: {error}") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"manifest.json has format {manifest.get('format')!r}, this version reads {FORMAT}"
        )
    if seal != _seal(manifest):
        raise CheckpointError("manifest.json does not match its own checksum")
    for name, (size, digest) in files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found is None:
            raise CheckpointError(f"{name} is missing")
        if found != size:
            raise CheckpointError(f"{name} has {found} bytes instead of {size}")
        if _fingerprint(file)[1] != digest:
            raise CheckpointError(f"{name} does not match its checksum")
    return step


def load(path: str | os.PathLike[str], where: Allocate | None = None) -> Loaded:
    """Verify and read one checkpoint, tensors on the CPU or where `where` puts them (of DTensors a part)."""
    path = Path(path)
    step = verify(path)
    try:
        document = json.loads((path / "state.json").read_bytes())["state"]
        tensors = {
            key: torch.empty(shape, dtype=dtype) if where is None else where(key, dtype, shape)
            for key, (dtype, shape) in statetree.describe(document).items()
        }
        _read_tensors(path, tensors)
        return Loaded(step, statetree.join(document, tensors), path)
    except CheckpointError:
        raise
    except Exception as error:  # torch's readers raise many kinds of exceptions
        raise CheckpointError(f"cannot be read: {type(error).__name__}: {error}") from error


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """`torch.distributed.checkpoint.save` for one process, step by step: no process group is involved."""
    writer = FileSystemWriter(path, single_file_per_rank=True, sync_files=True, thread_count=1)
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def _read_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """`torch.distributed.checkpoint.load` for one process; fills the given tensors."""
    reader = FileSystemReader(path)
    planner = DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(tensors), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([local]))[0])
    reader.read_data(plan, planner).wait()


def _manifest(step: int, files: Mapping[str, tuple[int, str]]) -> bytes:
    manifest = {"format": FORMAT, "step": step, "files": {name: list(entry) for name, entry in files.items()}}
    return json.dumps(manifest | {"seal": _seal(manifest)}, indent=1).encode()


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _fingerprint(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _explain(error: Exception, root: Path) -> str:
    """The problem and its remedy, in words."""
    codes = {e.errno for e in _chain(error) if isinstance(e, OSError)}
    if errno.ENOSPC in codes or errno.EDQUOT in codes:
        return f"no space left under {root}; free some, or keep fewer checkpoints. The next save tries again"
    if errno.EFBIG in codes:
        return (
            f"a file under {root} exceeds the allowed size (ulimit -f); raise it. The next save tries again"
        )
    if codes & {errno.EACCES, errno.EPERM, errno.EROFS}:
        return f"{root} cannot be written to: {error}"
    return f"{type(error).__name__}: {error}"
