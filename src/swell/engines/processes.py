"""What /proc says of processes: who descends from whom, and how much memory they hold."""

from __future__ import annotations

from pathlib import Path


def descendants(pid: int) -> list[int]:
    """All processes below one, however deep."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The command may hold spaces and brackets; the fields after the last bracket do not.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, open_ = [], [pid]
    while open_:
        for child in children.get(open_.pop(), []):
            found.append(child)
            open_.append(child)
    return found


def memory_bytes(pid: int) -> int:
    """Memory a process holds for itself (resident, without what it shares); 0 if it is gone."""
    try:
        pages = (Path("/proc") / str(pid) / "statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * 4096
