"""Notes: what the workers of one of torch's process groups must know of each other before they connect.

Each worker of the group leaves its notes with the coordinator (where it listens, say) and reads those of the
others, over connections of their own (role "notes"). The notes of a group are kept while one of its workers
is connected. A worker that connects again repeats its notes, so a coordinator that was started again has
them soon. This is the coordinator's side; `sync/reducer` is the workers'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Notes:
    """The notes of all process groups of a job."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, str]] = {}
        """By group: its notes."""
        self._connections: dict[str, set[object]] = {}
        """By group: those who may read and write them."""

    def join(self, group: str, connection: object) -> None:
        """Keep the notes of `group` as long as `connection`."""
        self._connections.setdefault(group, set()).add(connection)
        self._values.setdefault(group, {})

    def leave(self, group: str, connection: object) -> None:
        """A connection has ended; the last one takes the notes of its group along."""
        self._connections[group].discard(connection)
        if not self._connections[group]:
            del self._connections[group], self._values[group]

    def write(self, group: str, values: Mapping[str, str]) -> None:
        """Add notes to those of a group."""
        self._values[group].update((str(key), str(value)) for key, value in values.items())

    def read(self, group: str, keys: Iterable[str]) -> dict[str, str]:
        """Those of these notes that have been written."""
        found = self._values[group]
        return {key: found[key] for key in keys if key in found}
