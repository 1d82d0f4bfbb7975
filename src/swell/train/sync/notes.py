"""How the workers of one of torch's process groups find each other: by notes that the coordinator keeps.

Torch asks for a *store* in which each worker of a group says where it listens. `NoteStore` is one that goes
over an authenticated connection to the job's coordinator, as everything else between the processes of a job.
So it works between hosts, opens no port, and strangers can neither read nor write it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from msgspec import Struct
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from swell.train.agent.errors import TrainError
from swell.train.agent.jobdir import JobDirectory
from swell.train.agent.protocol import NotesFound, NotesHello, ReadNotes, WriteNotes, read
from swell.train.agent.wire import Connection, Message, WireError

PATIENCE_S = 120.0
"""How long a store tries to reach the coordinator before it gives up."""
_RETRY_S = 0.05
_LOOK_EVERY_S = 0.01


class NoteStore(Store):
    """The notes of one process group, as torch reads and writes them.

    Torch keeps only the part of this object that is written in C++: whoever makes a process group of it must
    keep this object for as long as the group.
    """

    def __init__(self, directory: Path, group: str) -> None:
        super().__init__()
        # Else a thread of NCCL's would ask the store every second whether another worker has failed.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        self._directory = JobDirectory(directory)
        self._config = self._directory.config()
        launch = os.environ.get("SWELL_LAUNCH") or str(self._config.get("launch"))
        self._hello = NotesHello(f"{launch}/{group}")
        self._own: dict[str, str] = {}
        self._connection: Connection | None = None
        self._closed = False
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Write a note."""
        text = (value.encode() if isinstance(value, str) else value).decode("latin-1")
        self._own[key] = text
        self._ask(WriteNotes({key: text}))

    def get(self, key: str) -> bytes:
        """Read a note; wait until it is there."""
        return self._wait([key])[key].encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these notes are there."""
        return len(self._read(keys)) == len(set(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all these notes are there."""
        self._wait(keys, timeout)

    def close(self) -> None:
        """Hang up; nothing can be read or written any more, and those who wait for a note are told so."""
        self._closed = True
        if (connection := self._connection) is not None:
            connection.close()

    def _wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> dict[str, str]:
        patience: timedelta = timeout or self.timeout  # type: ignore[attr-defined]  # set by `set_timeout`
        give_up_s = time.monotonic() + patience.total_seconds()
        while len(found := self._read(keys)) < len(set(keys)):
            if time.monotonic() > give_up_s:
                missing = ", ".join(key for key in keys if key not in found)
                raise DistStoreError(f"no worker of the group has written {missing}")
            time.sleep(_LOOK_EVERY_S)
        return found

    def _read(self, keys: Sequence[str]) -> dict[str, str]:
        return read(NotesFound, self._ask(ReadNotes(list(keys)))).values

    def _ask(self, message: Struct) -> Message:
        """The coordinator's answer; a coordinator that is being started again is waited for."""
        give_up_s = time.monotonic() + PATIENCE_S
        with self._lock:
            while True:
                try:
                    return self._connected().request(message)
                except (OSError, WireError) as error:
                    if self._connection is not None:
                        self._connection.close()
                        self._connection = None
                    if self._closed:
                        raise DistStoreError("this store is closed") from None
                    if time.monotonic() > give_up_s:
                        raise DistStoreError(f"the coordinator does not answer: {error}") from None
                except TrainError as error:
                    raise DistStoreError(f"the coordinator refused: {error}") from None
                time.sleep(_RETRY_S)

    def _connected(self) -> Connection:
        if self._closed:
            raise ConnectionError
        if self._connection is None:
            connection = Connection.to_job(self._directory.address(), self._config)
            connection.request(self._hello)
            connection.request(WriteNotes(dict(self._own)))
            self._connection = connection
        return self._connection
