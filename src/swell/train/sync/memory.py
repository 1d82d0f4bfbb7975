"""Where the vectors of the members are: in memory that is read from here, or in places where they arrive.

Members on the same host map each other's segments. The vectors of other members travel with the messages and
arrive in *places*, memory of this worker. Both are prepared when a member is met, in the background, so that
a switch neither maps nor allocates anything.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from swell.train.sync.adding import Raw
from swell.train.sync.device import DeviceSegment
from swell.train.sync.flat import FlatModel
from swell.train.sync.mesh import Header, Mesh
from swell.train.sync.pieces import Piece
from swell.train.sync.segment import Segment
from swell.train.sync.transfer import let_go

Travel = tuple[dict[int, list[Raw]], dict[int, list[Raw]]]
"""By rank of a member on another host: what is sent to it, and what is received from it."""


class MemberMemory:
    """The memory of the members of a generation, and of workers that may be in the next one."""

    def __init__(self, flat: FlatModel) -> None:
        self.flat = flat
        self.inputs_of: dict[int, list[Tensor]] = {}
        """The members' vectors by rank: shared memory, or where those of members on other hosts arrive."""
        self.outputs_of: dict[int, list[Tensor]] = {}
        """The sums of the members whose memory can be read."""
        self.far: set[int] = set()
        """The members whose memory cannot be read from here."""
        self.apart = False
        """Whether any two members cannot read each other's memory; the same on all members."""
        self._maps: dict[str, Segment | DeviceSegment] = {}
        """By token: the memory of the present members."""
        self._prepared: dict[str, tuple[int, Segment | DeviceSegment]] = {}
        """By token: the latest candidate that a worker was met for, and its memory."""
        self._places: list[list[Tensor]] = []
        """Memory where the vectors of further members on other hosts can arrive."""
        self._unreadable = (0, 0)
        """A candidate, and how many of its members were met so far whose memory cannot be read."""
        self._meeting = threading.Lock()

    def meet(self, about: Header, candidate: int = 0) -> None:
        """Prepare for a member of `candidate`, in the background while the present members train.

        Its memory is mapped; if that cannot be done, there will be memory here for what it sends.
        """
        if about.get("position", 0) != self.flat.position:
            return  # it has another part of the model
        description = about.get("segment")
        token = description["token"] if description else ""
        segment = self._known(token) or self.flat.open(description)
        if segment is not None:
            self._prepared[token] = (candidate, segment)
            return
        with self._meeting:
            number, count = self._unreadable
            count = count + 1 if number == candidate else 1
            self._unreadable = (candidate, count)
            if count > len(self.far) + len(self._places):
                place = self._new_place()
                for vector in place:
                    vector.zero_()  # no exchange has to wait for its pages
                self._places.append(place)

    def _known(self, token: str) -> Segment | DeviceSegment | None:
        """The memory with this token, if it is mapped."""
        return self._maps.get(token) or self._prepared.get(token, (0, None))[1]

    def _new_place(self) -> list[Tensor]:
        return [torch.empty_like(vector) for vector in self.flat.inputs]

    def readable(self, mesh: Mesh) -> list[int]:
        """The ranks whose memory was mapped when they were met."""
        found = []
        for rank, peer in mesh.peers.items():
            token = (peer.about.get("segment") or {}).get("token", "")
            if self._known(token):
                found.append(rank)
        return found

    def connect(self, mesh: Mesh, near: set[int], apart: bool | None = None) -> None:
        """Find the memory of each member: its own, if that was mapped when it was met, or a place here.

        With the ranks in `near`, each side reads the other's memory. `apart`: whether any two members cannot;
        all members must say the same.
        """
        layout = self.flat.layout
        places = [self.inputs_of[rank] for rank in self.far] + self._places
        self.inputs_of = {mesh.rank: self.flat.inputs} if mesh.size > 1 else {}
        self.outputs_of, self.far, self._places = {}, set(), []
        maps: dict[str, Segment | DeviceSegment] = {}
        for rank, peer in mesh.peers.items():
            if (rank - mesh.rank) % self.flat.stride:
                continue  # it has another part of the model
            description = peer.about.get("segment")
            token = description["token"] if description else ""
            segment = self._known(token)
            if rank not in near or segment is None or description is None:
                self.far.add(rank)
                self.inputs_of[rank] = places.pop() if places else self._new_place()
            else:
                maps[token] = segment
                mesh.processes[rank] = int(description["pid"])
                self.inputs_of[rank] = layout.flats(segment, 0)
                self.outputs_of[rank] = layout.flats(segment, 1)
        self.apart = bool(self.far) if apart is None else apart
        prepared = dict(self._prepared)
        later = {token: one for token, one in prepared.items() if one[0] > mesh.number}
        before = {token: segment for token, (_, segment) in prepared.items()} | self._maps
        # What is freed here would be unmapped while all members wait.
        let_go([*(segment for token, segment in before.items() if token not in maps | later), *places])
        self._maps, self._prepared = maps, later

    def inputs(self, piece: Piece) -> Travel:
        """The inputs of `piece`, to and from each member on another host."""
        sent = {rank: [Raw(self.flat.inputs, piece, True)] for rank in self.far}
        return sent, {rank: [Raw(self.inputs_of[rank], piece)] for rank in self.far}
