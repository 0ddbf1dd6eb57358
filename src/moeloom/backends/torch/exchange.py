"""Rows between the sorted order of the ranks that hold tokens and the expert order of the ranks that hold experts.

On one rank both orders are the same and nothing moves: :class:`LocalRows`. With several ranks, :class:`RemoteRows`:
rows are sorted by global expert, so what goes to one rank lies together, and an all-to-all of unequal parts moves it.
What arrives is ordered by (source rank, expert, token, k) and is brought into the order (expert, source rank, token,
k), that of the global batch; nothing depends on when a message came.

Example: 2 ranks with 2 experts each. Rank 0 keeps to itself a row for its expert 0 and three for its expert 1; rank 1
sends it two rows for expert 0. In order of arrival they are a | b c d | e f, in expert order a e f | b c d. So
``by_expert = [0, 4, 5, 1, 2, 3]`` and ``by_arrival = [0, 3, 4, 5, 1, 2]``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moeloom.backends.call import LayerCall
from moeloom.backends.torch.gemm import ExpertRows, grouped_mm_is_native
from moeloom.backends.torch.routing import Routes
from moeloom.errors import PeerLost
from moeloom.runtime.ep_group import EPGroup

#: How long ranks may take to answer after a collective on the device failed, in seconds.
_ROLL_CALL_SECONDS = 10.0
#: Pause between two looks at a collective, in seconds.
_POLL_SECONDS = 2e-5


class LocalRows:
    """Exchange of a group of one rank: sorted rows are expert rows.

    Attributes:
        experts: the rows of each expert.
        keeps: this rank keeps pre-activations for backward.
        someone_lacks: always False, nobody waits for rows a second time.
    """

    someone_lacks = False

    def __init__(self, experts: ExpertRows, *, keeps: bool) -> None:
        self.experts, self.keeps = experts, keeps

    def pull(self, rows: Sequence[Tensor], *, phase: str) -> list[Tensor]:
        """Return sorted rows [R + 1, W] in expert order."""
        return list(rows)

    def push(self, rows: Sequence[Tensor], *, phase: str) -> list[Tensor]:
        """Return expert rows in sorted order, [R + 1, W], with zeros in the spare row, which is overwritten."""
        for each in rows:
            each[-1].zero_()
        return list(rows)


class RemoteRows:
    """Exchange between several ranks. The host knows all its sizes.

    Args:
        group: EP group.
        sorted_rows: R + 1.
        sends: rows that go to each rank.
        arrivals: int64 [ranks, experts of this rank] on the CPU, rows that come from each rank for each expert.
        keeping: which ranks keep token rows and pre-activations for backward, so that nobody sends them again.
        grouped: see :class:`~moeloom.backends.torch.gemm.ExpertRows`.
        device: of the rows.
        seconds: deadline of an exchange; 0 means none.

    Attributes:
        experts: the rows of each expert.
        keeps: this rank is one of those that keep.
        someone_lacks: not all ranks keep, so :meth:`pull_again` moves something.
    """

    def __init__(
        self,
        group: EPGroup,
        sorted_rows: int,
        sends: list[int],
        arrivals: Tensor,
        keeping: list[bool],
        *,
        grouped: bool,
        device: torch.device,
        seconds: float,
    ) -> None:
        self._group, self._sorted_rows, self._seconds = group, sorted_rows, seconds
        self._sends, self._receives, self._keeping = sends, arrivals.sum(1).tolist(), keeping
        counts = arrivals.sum(0)
        ends = counts.cumsum(0).to(device, torch.int32)
        self.experts = ExpertRows(ends, grouped=grouped, counts=counts.tolist())
        self.keeps, self.someone_lacks = keeping[group.rank], not all(keeping)
        # First place of each (source rank, expert) in order of arrival and in expert order.
        arrived = _starts(arrivals)
        wanted = _starts(arrivals.t()).t()
        self._by_expert = _moved((arrived - wanted).t(), arrivals.t(), device)
        self._by_arrival = _moved(wanted - arrived, arrivals, device)

    def pull(self, rows: Sequence[Tensor], *, phase: str) -> list[Tensor]:
        """Send sorted rows [R + 1, W] to the ranks of their experts; return those of this rank in expert order."""
        arrived = self._move(rows, self._sends, self._receives, sum(self._receives), phase)
        return [each.index_select(0, self._by_expert) for each in arrived]

    def pull_again(self, rows: Tensor, *, phase: str) -> Tensor | None:
        """Do :meth:`pull` for the ranks that did not keep the rows; return None on a rank that did."""
        sends = [0 if kept else count for kept, count in zip(self._keeping, self._sends, strict=True)]
        receives = [0 if self.keeps else count for count in self._receives]
        if any(self._keeping):
            parts = rows[: sum(self._sends)].split(self._sends)
            rows = torch.cat([part for part, kept in zip(parts, self._keeping, strict=True) if not kept])
        (arrived,) = self._move([rows], sends, receives, sum(receives), phase)
        return None if self.keeps else arrived.index_select(0, self._by_expert)

    def push(self, rows: Sequence[Tensor], *, phase: str) -> list[Tensor]:
        """Send expert rows back; return them in sorted order, [R + 1, W], with zeros in the spare row."""
        back = [each.index_select(0, self._by_arrival) for each in rows]
        arrived = self._move(back, self._receives, self._sends, self._sorted_rows, phase)
        for each in arrived:
            each[-1].zero_()
        return arrived

    def _move(
        self, rows: Sequence[Tensor], sends: list[int], receives: list[int], target_rows: int, phase: str
    ) -> list[Tensor]:
        """Send ``sends[p]`` consecutive rows of each tensor to rank p; return what comes, in rank order."""
        targets = [each.new_empty(target_rows, each.shape[1]) for each in rows]
        transport = self._group.device_transport(rows[0].device)
        if transport is not None:
            for source, target in zip(rows, targets, strict=True):
                parts = target[: sum(receives)], source[: sum(sends)], receives, sends
                _all_to_all(self._group, transport, *parts, phase=phase, seconds=self._seconds)
            return targets
        outgoing = list(zip(*(each[: sum(sends)].split(sends) for each in rows), strict=True))
        incoming = list(zip(*(each[: sum(receives)].split(receives) for each in targets), strict=True))
        self._group.exchange(outgoing, incoming, phase=phase, seconds=self._seconds)
        for own, value in zip(incoming[self._group.rank], outgoing[self._group.rank], strict=True):
            own.copy_(value)
        return targets


def open_exchange(call: LayerCall, routes: Routes, *, keeps: bool) -> LocalRows | RemoteRows:
    """Work out what moves in one call. With several ranks they tell each other how many rows, and the host waits.

    Args:
        call: arguments.
        routes: of this rank's tokens.
        keeps: this rank will keep token rows and pre-activations for backward.

    Raises:
        PeerLost: a rank did not take part.
    """
    hidden, inner = call.down_proj.shape[1:]
    grouped = grouped_mm_is_native(call.x, call.num_local_experts, hidden, inner)
    group, experts = call.group, call.num_local_experts
    if group.size == 1:
        return LocalRows(ExpertRows(routes.ends, grouped=grouped), keeps=keeps)
    seconds = call.config.wait_seconds(entry=False)
    counts = ExpertRows(routes.ends, grouped=False).rows_per_expert.cpu().view(group.size, experts)
    mine = torch.cat([counts, torch.full((group.size, 1), int(keeps))], dim=1)
    theirs = torch.empty_like(mine)
    group.exchange([[part] for part in mine], [[part] for part in theirs], phase="forward routes", seconds=seconds)
    theirs[group.rank] = mine[group.rank]
    return RemoteRows(
        group,
        routes.order.shape[0],
        counts.sum(1).tolist(),
        theirs[:, :experts],
        [bool(kept) for kept in theirs[:, experts].tolist()],
        grouped=grouped,
        device=call.x.device,
        seconds=seconds,
    )


def _starts(counts: Tensor) -> Tensor:
    """Return where each part begins when parts of these sizes, [a, b], lie one after the other."""
    flat = counts.reshape(-1)
    return (flat.cumsum(0) - flat).view(counts.shape)


def _moved(distance: Tensor, counts: Tensor, device: torch.device) -> Tensor:
    """Return 0, 1, 2, ... with ``distance[i]`` added to each of the next ``counts[i]`` numbers, int64 on ``device``."""
    total = int(counts.sum())
    distance, counts = distance.reshape(-1).to(device), counts.reshape(-1).to(device)
    return torch.arange(total, device=device) + distance.repeat_interleave(counts, output_size=total)


def _all_to_all(
    group: EPGroup,
    transport: dist.ProcessGroup,
    target: Tensor,
    source: Tensor,
    receives: list[int],
    sends: list[int],
    *,
    phase: str,
    seconds: float,
) -> None:
    """Exchange rows by one collective on the device, and wait for it with a deadline.

    A collective's error does not say who is missing, so all ranks then answer a roll call over the CPU.

    Raises:
        PeerLost: the collective failed or took too long.
    """
    started = time.monotonic()
    try:
        work = dist.all_to_all_single(target, source, receives, sends, group=transport, async_op=True)
        while not work.is_completed():
            if seconds and time.monotonic() - started > seconds:
                raise RuntimeError("the collective did not end")
            time.sleep(_POLL_SECONDS)
        work.wait()
    except RuntimeError as error:
        group.gather_words([0], phase=phase, seconds=_ROLL_CALL_SECONDS)
        here = group.global_ranks[group.rank]
        detail = f"{error}; every rank still answers over the CPU, so look for the cause in the device's transport"
        raise PeerLost(here, phase, time.monotonic() - started, detail) from error
