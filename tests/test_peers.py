"""Ranks that die, do not come, or come with something else: an error that names them, in time, and no process left."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moeloom import ArgumentError, MoEConfig, PeerLost, PeerMismatch, moe
from tests.cases import Case, run
from tests.ranks import run_ranks

LIMIT = 3.0
SLACK = 2.0
CONFIG = MoEConfig(minibatch_rows=128, timeout_s=LIMIT)
CASE = Case(tokens=300, experts=4, hidden=16, inner=8)


def part(rank: int, world: int, experts: int = 4):
    share = 300 // world
    return replace(CASE, experts=experts).make().part(rank * share, (rank + 1) * share, rank, world)


def dies_between_calls(rank: int, world: int, victim: int) -> None:
    run(part(rank, world), group=dist.group.WORLD, config=CONFIG)
    if rank == victim:
        os._exit(9)
    for _ in range(3):
        run(part(rank, world), group=dist.group.WORLD, config=CONFIG)


def dies_inside(rank: int, world: int, victim: int, phase: str) -> None:
    """The victim is killed when it enters ``phase``."""
    from moeloom.runtime.ep_group import EPGroup

    original = EPGroup.exchange

    def exchange(self, outgoing, incoming, *, phase: str, seconds: float):
        if rank == victim and phase == wanted:
            os._exit(9)
        return original(self, outgoing, incoming, phase=phase, seconds=seconds)

    wanted, EPGroup.exchange = phase, exchange
    run(part(rank, world), group=dist.group.WORLD, config=CONFIG)
    run(part(rank, world), group=dist.group.WORLD, config=CONFIG)


def dies_half_way(rank: int, world: int) -> None:
    """Rank 2 deals with rank 0 alone and dies; rank 0 then meets the loss of rank 1 first, which ended because of it."""
    from moeloom.runtime.ep_group import EPGroup

    original = EPGroup.exchange

    def exchange(self, outgoing, incoming, *, phase: str, seconds: float):
        if phase == "forward pull" and rank == 2:
            sent, received = dist.isend(outgoing[0][0], dst=0), dist.irecv(incoming[0][0], src=0)
            sent.wait(), received.wait()
            time.sleep(0.5)
            os._exit(9)
        if phase == "forward push" and rank == 0:
            time.sleep(1.5)
        return original(self, outgoing, incoming, phase=phase, seconds=seconds)

    EPGroup.exchange = exchange
    run(part(rank, world, experts=6), group=dist.group.WORLD, config=CONFIG)


def test_all_ranks_name_the_one_that_was_lost_first():
    assert_lost(run_ranks(dies_half_way, 3, seconds=40), 2, LIMIT + SLACK, "forward")


def skips(rank: int, world: int, victim: int) -> None:
    run(part(rank, world), group=dist.group.WORLD, config=CONFIG)
    if rank == victim:
        time.sleep(LIMIT + 2 * SLACK)
        return
    run(part(rank, world), group=dist.group.WORLD, config=CONFIG)


def skips_backward(rank: int, world: int, victim: int) -> None:
    inputs = part(rank, world)
    gate_up = inputs.gate_up.requires_grad_()
    out = moe(inputs.x, inputs.ids, inputs.topk_weights, gate_up, inputs.down, group=dist.group.WORLD, config=CONFIG)
    if rank == victim:
        time.sleep(LIMIT + 2 * SLACK)
        return
    out.sum().backward()


def assert_lost(outcomes, victim: int, seconds: float, phases: str = "") -> None:
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert isinstance(outcome.error, PeerLost), f"rank {rank}: {outcome.error!r}\n{outcome.trace}"
        assert outcome.error.rank == victim, f"rank {rank} blames rank {outcome.error.rank}: {outcome.error}"
        assert phases in outcome.error.phase
        assert f"rank {victim}" in str(outcome.error) and outcome.error.phase in str(outcome.error)
        assert outcome.seconds < seconds, f"rank {rank} took {outcome.seconds:.1f} s"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_rank_that_dies_between_calls(victim):
    """Report 14."""
    assert_lost(run_ranks(dies_between_calls, 3, victim, seconds=40), victim, LIMIT + SLACK)


@pytest.mark.parametrize(
    "phase",
    [
        "forward entry",
        "forward routes",
        "forward pull",
        "forward push",
        "backward entry",
        "backward pull",
        "backward push",
    ],
)
def test_rank_that_dies_in_a_phase(phase):
    assert_lost(run_ranks(dies_inside, 3, 1, phase, seconds=40), 1, LIMIT + SLACK, phase.split()[0])


def test_rank_that_skips_a_call():
    """Report 11, second half."""
    assert_lost(run_ranks(skips, 3, 2, seconds=40), 2, LIMIT + SLACK, "forward entry")


def test_rank_that_skips_backward():
    assert_lost(run_ranks(skips_backward, 2, 0, seconds=40), 0, LIMIT + SLACK, "backward entry")


def waits_for_a_slow_rank(rank: int, world: int) -> None:
    config = MoEConfig(timeout_s=LIMIT)
    if rank == 1:
        time.sleep(LIMIT / 2)
    run(part(rank, world), group=dist.group.WORLD, config=config)


def test_a_slow_rank_is_waited_for():
    assert [o.error for o in run_ranks(waits_for_a_slow_rank, 2)] == [None, None]


def disagrees(rank: int, world: int, what: str) -> None:
    inputs = part(rank, world)
    config = CONFIG
    if what == "top_k":
        if rank:
            inputs.ids, inputs.topk_weights = inputs.ids[:, :1], inputs.topk_weights[:, :1]
    elif what == "the hidden size":
        if rank:
            inputs.x, inputs.gate_up, inputs.down = inputs.x[:, :8], inputs.gate_up[..., :8], inputs.down[:, :8]
            inputs.d_out = inputs.d_out[:, :8]
    elif what == "minibatch_rows":
        config = MoEConfig(minibatch_rows=256 if rank else 128, timeout_s=LIMIT)
    elif what == "the call's number":
        if rank:
            from moeloom.runtime.ep_group import resolve_group

            resolve_group(dist.group.WORLD).calls += 1
    elif what == "needing gradients" and rank:
        with torch.no_grad():
            moe(
                inputs.x,
                inputs.ids,
                inputs.topk_weights,
                inputs.gate_up,
                inputs.down,
                group=dist.group.WORLD,
                config=config,
            )
        return
    run(inputs, group=dist.group.WORLD, config=config)


@pytest.mark.parametrize(
    "what", ["top_k", "the hidden size", "minibatch_rows", "the call's number", "needing gradients"]
)
def test_ranks_that_disagree(what):
    for rank, outcome in enumerate(run_ranks(disagrees, 2, what, seconds=40)):
        assert isinstance(outcome.error, PeerMismatch), f"rank {rank}: {outcome.error!r}"
        assert what in str(outcome.error) and f"rank {1 - rank}" in str(outcome.error)
        assert outcome.seconds < LIMIT


def refuses(rank: int, world: int) -> None:
    inputs = part(rank, world)
    if rank == 1:
        inputs.topk_weights = inputs.topk_weights.half()
    moe(inputs.x, inputs.ids, inputs.topk_weights, inputs.gate_up, inputs.down, group=dist.group.WORLD, config=CONFIG)


def test_ranks_hear_at_once_of_one_that_refused_its_arguments():
    first, second = run_ranks(refuses, 2, seconds=40)
    assert isinstance(first.error, PeerMismatch) and "rank 1 refused" in str(first.error) and first.seconds < LIMIT
    assert "topk_weights" in str(second.error)


def outside(rank: int, world: int) -> None:
    group = dist.new_group([0])
    inputs = part(0, 1)
    moe(inputs.x, inputs.ids, inputs.topk_weights, inputs.gate_up, inputs.down, group=group)


def test_a_process_outside_the_group_is_told_so():
    first, second = run_ranks(outside, 2)
    assert first.error is None
    assert isinstance(second.error, ArgumentError) and "group must contain this process" in str(second.error)


def group_without_cpu(rank: int, world: int) -> str:
    from moeloom.runtime import ep_group

    def refuse(self, device):
        raise RuntimeError("No backend type associated with device type cpu")

    dist.ProcessGroup._get_backend = refuse
    try:
        ep_group.resolve_group(dist.group.WORLD)
    except ArgumentError as error:
        return str(error)
    return "accepted"


def test_a_group_that_cannot_move_cpu_tensors_is_refused():
    """An NCCL group: without this check the first exchange would blame a peer."""
    (outcome,) = run_ranks(group_without_cpu, 1)
    assert "group must be able to move CPU tensors (gloo)" in outcome.value and "cpu:gloo,cuda:nccl" in outcome.value


def test_errors_pickle():
    """Errors cross process boundaries in test runners and launchers."""
    import pickle

    error = pickle.loads(pickle.dumps(PeerLost(3, "forward pull", 1.5, "gone")))
    assert (error.rank, error.phase, error.seconds) == (3, "forward pull", 1.5) and "rank 3" in str(error)
