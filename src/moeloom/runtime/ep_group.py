"""The EP group: ranks that share the experts, and the one way in which they exchange tensors.

Every exchange posts all its sends and receives before it waits for any of them, so ranks never wait in a circle; every
wait has a deadline and ends in :class:`~moeloom.errors.PeerLost` that names the missing rank. The first rank that
notices a loss leaves a note in the process group's store, so that the others name the same rank and not each other.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moeloom.errors import ArgumentError, PeerLost, PeerMismatch, complain

#: Deadline handed to the transport when the user asks for none.
_FOR_EVER = timedelta(days=365)
#: How long to look for another rank's note before blaming the rank that we saw fail, in seconds.
_NOTE_SECONDS = 0.5


class EPGroup:
    """One process's view of its EP group.

    Attributes:
        size: ranks in the group.
        rank: this process's place in the group.
        global_ranks: ``torch.distributed`` ranks of the members, in group order.
        calls: layer calls entered so far; every rank counts the same calls in the same order.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._group = process_group
        self.calls = 0
        if process_group is None:
            self.size, self.rank, self.global_ranks = 1, 0, [0]
            return
        self.global_ranks = dist.get_process_group_ranks(process_group)
        self.size = len(self.global_ranks)
        self.rank = dist.get_rank(process_group)
        self._note_key = "moeloom/lost/" + "-".join(map(str, self.global_ranks))

    def exchange(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]], *, phase: str, seconds: float
    ) -> None:
        """Send tensors to every peer and receive into tensors from every peer.

        Args:
            outgoing: per group rank, contiguous tensors to send there in order; the own place is ignored.
            incoming: per group rank, contiguous tensors to fill with what comes from there. Sizes and dtypes must be
                what the peer sends; empty tensors are skipped on both sides.
            phase: named in errors.
            seconds: deadline for the whole exchange; 0 means none.

        Raises:
            PeerLost: a peer died or did not send or receive before the deadline.
        """
        if self.size == 1:
            return
        started = time.monotonic()
        posted: list[_Posted] = []
        # Rank r begins with rank r + 1, so that not all ranks turn to the same one first.
        for step in range(1, self.size):
            target, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            try:
                peer = self.global_ranks[target]
                posted += [_send(t, peer, self._group) for t in outgoing[target] if t.numel()]
                peer = self.global_ranks[source]
                posted += [_receive(t, peer, self._group) for t in incoming[source] if t.numel()]
            except RuntimeError as error:
                raise self._lost(peer, phase, started, error) from error
        for transfer in posted:
            limit = timedelta(seconds=max(0.001, started + seconds - time.monotonic())) if seconds else _FOR_EVER
            try:
                arrived = transfer.work.wait(limit)
            except RuntimeError as error:
                raise self._lost(transfer.peer, phase, started, error) from error
            if not arrived:
                raise self._lost(transfer.peer, phase, started, "the transfer was aborted")
        for transfer in posted:
            if transfer.target is not None and transfer.target is not transfer.wire:
                transfer.target.copy_(transfer.wire)

    def device_transport(self, device: torch.device) -> dist.ProcessGroup | None:
        """Return the process group if it moves tensors of ``device`` itself, by NCCL; None means through the CPU."""
        if device.type != "cuda" or self._group is None:
            return None
        try:
            backend = self._group._get_backend(device)
        except RuntimeError:
            return None
        return self._group if backend.name() == "nccl" else None

    def gather_words(self, words: list[int], *, phase: str, seconds: float) -> list[list[int]]:
        """Send the same integers to every rank and return those of all ranks in group order."""
        mine = torch.tensor(words, dtype=torch.int64)
        theirs = [torch.zeros_like(mine) for _ in range(self.size)]
        self.exchange([[mine]] * self.size, [[t] for t in theirs], phase=phase, seconds=seconds)
        theirs[self.rank] = mine
        return [t.tolist() for t in theirs]

    def gather_json(self, message: object, *, seconds: float, phase: str = "messages") -> list:
        """Return the JSON-able messages of all ranks in group order."""
        data = json.dumps(message).encode()
        sizes = [words[0] for words in self.gather_words([len(data)], phase=phase, seconds=seconds)]
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        theirs = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self.exchange([[mine]] * self.size, [[t] for t in theirs], phase=phase, seconds=seconds)
        theirs[self.rank] = mine
        return [json.loads(bytes(t.numpy())) for t in theirs]

    def sum_ordered(self, vector: Tensor, *, phase: str, seconds: float) -> None:
        """Replace a contiguous 1-D ``vector`` by its sum over ranks, added in rank order: the same bits everywhere.

        Each rank adds up one piece of the vector, so a rank sends about twice its size whatever the number of ranks.
        """
        if self.size == 1:
            return
        bounds = [vector.numel() * p // self.size for p in range(self.size + 1)]
        pieces = [vector[bounds[p] : bounds[p + 1]] for p in range(self.size)]
        parts = [torch.empty_like(pieces[self.rank]) for _ in range(self.size)]
        self.exchange([[p] for p in pieces], [[p] for p in parts], phase=phase, seconds=seconds)
        parts[self.rank].copy_(pieces[self.rank])
        total = pieces[self.rank]
        total.copy_(parts[0])
        for part in parts[1:]:
            total += part
        self.exchange([[total]] * self.size, [[p] for p in pieces], phase=phase, seconds=seconds)

    def __deepcopy__(self, memo: object) -> EPGroup:
        """A group is shared by all copies of a module."""
        return self

    def _lost(self, peer: int, phase: str, started: float, cause: object) -> PeerLost:
        """Build the error for a failed wait, naming the rank that some member noticed first."""
        waited = time.monotonic() - started
        # Of gloo's text only what happened: without its source file before, and its advice after.
        what = re.sub(r"^\[[^]]*\] *", "", str(cause)).split(". ")[0].strip()
        return PeerLost(self._first_lost(peer), phase, waited, what)

    def _first_lost(self, peer: int) -> int:
        with contextlib.suppress(Exception):  # The store may live in the very process that died.
            store = dist.distributed_c10d._get_default_store()
            store.set_timeout(timedelta(seconds=_NOTE_SECONDS))
            noted = store.compare_set(self._note_key, "", str(peer)).decode()
            return int(noted or peer)
        return peer


class _Posted(NamedTuple):
    """A transfer under way: with whom, its handle, the memory that it uses, and where a receipt goes afterwards."""

    peer: int
    work: dist.Work
    wire: Tensor
    target: Tensor | None


def _send(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> _Posted:
    wire = tensor.contiguous().cpu()
    return _Posted(peer, dist.isend(wire, dst=peer, group=group), wire, None)


def _receive(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> _Posted:
    wire = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
    return _Posted(peer, dist.irecv(wire, src=peer, group=group), wire, tensor)


def resolve_group(group: object) -> EPGroup:
    """Return the :class:`EPGroup` of a ``torch.distributed`` process group, or of one process for ``None``.

    Raises:
        ArgumentError: ``group`` is no process group, torch.distributed is not initialised, or we are no member.
    """
    if group is None:
        return EPGroup(None)
    if isinstance(group, EPGroup):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        fix = "Call torch.distributed.init_process_group() first, or pass group=None for a single process."
        raise ArgumentError(complain("group", "come from an initialised torch.distributed", type(group).__name__, fix))
    if group is dist.group.WORLD:
        group = dist.distributed_c10d._get_default_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        fix = "Build the layer only on member ranks."
        raise ArgumentError(complain("group", "contain this process", f"rank {dist.get_rank()} outside it", fix))
    if not isinstance(group, dist.ProcessGroup):
        fix = "Pass what torch.distributed.new_group() returned, or None."
        raise ArgumentError(complain("group", "be a torch.distributed process group", type(group).__name__, fix))
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        fix = "Use init_process_group('cpu:gloo,cuda:nccl'), or a gloo group for the experts."
        raise ArgumentError(
            complain("group", "be able to move CPU tensors (gloo)", dist.get_backend(group), fix)
        ) from error
    known = _GROUPS.get(group)
    if known is None:
        known = _GROUPS[group] = EPGroup(group)
    return known


#: One EPGroup per process group, so that all layers of a group share one call counter. An EPGroup holds on to its
#: process group, so entries live as long as the process.
_GROUPS: dict[dist.ProcessGroup, EPGroup] = {}


def agree(group: EPGroup, fields: dict[str, int], *, phase: str, seconds: float) -> list[dict[str, int]]:
    """Exchange the facts that every rank states on entry, and return them for all ranks in group order.

    Fields whose name starts with ``_`` may differ between ranks; all others must be equal. ``_refused`` not 0 means
    that this rank found its arguments wrong and is about to raise.

    Raises:
        PeerLost: a rank did not come before the deadline.
        PeerMismatch: a rank refused its arguments, or a field differs.
    """
    if group.size == 1:
        return [fields]
    names = list(fields)
    rows = group.gather_words([fields[n] for n in names], phase=phase, seconds=seconds)
    stated = [dict(zip(names, row, strict=True)) for row in rows]
    if fields.get("_refused"):
        return stated
    for place, other in enumerate(stated):
        rank = group.global_ranks[place]
        if other.get("_refused"):
            raise PeerMismatch(f"rank {rank} refused its arguments in phase '{phase}'; its own log says which and why.")
        for name in names:
            if not name.startswith("_") and other[name] != fields[name]:
                raise PeerMismatch(
                    f"{name} must be equal on all ranks of the EP group in phase '{phase}'; rank {rank} has "
                    f"{other[name]}, rank {group.global_ranks[group.rank]} has {fields[name]}. Make the same calls in "
                    "the same order with the same layer on every rank."
                )
    return stated
