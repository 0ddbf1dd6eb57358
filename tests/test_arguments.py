"""Wrong arguments: an error that names the argument, the rule, what came and what to do, before any work."""

from __future__ import annotations

import pytest
import torch

from moeloom import ArgumentError, ArgumentTypeError, MoE, MoEConfig, MoeloomError, RouterConfig, SharedExperts, moe
from tests.cases import Case

TOKENS, H, INNER, E, K = 6, 8, 4, 3, 2


def call(config=None, **changes):
    inputs = Case(tokens=TOKENS, hidden=H, inner=INNER, experts=E, top_k=K).make()
    given = dict(
        x=inputs.x,
        topk_ids=inputs.ids,
        topk_weights=inputs.topk_weights,
        gate_up_proj=inputs.gate_up,
        down_proj=inputs.down,
    )
    return moe(**{**given, **changes}, config=config)


WRONG = {
    "x no tensor": (dict(x=[[1.0]]), ArgumentTypeError, "x must be a torch.Tensor"),
    "x of integers": (
        dict(x=torch.zeros(TOKENS, H, dtype=torch.int64)),
        ArgumentTypeError,
        "x must be one of float32, bfloat16, float64",
    ),
    "x of halves": (dict(x=torch.zeros(TOKENS, H).half()), ArgumentTypeError, "x must be one of"),
    "x scalar": (dict(x=torch.tensor(1.0)), ArgumentError, r"x must have shape \[..., H\]"),
    "x empty width": (dict(x=torch.zeros(TOKENS, 0)), ArgumentError, "H >= 1"),
    "ids no tensor": (dict(topk_ids=[0]), ArgumentTypeError, "topk_ids must be a torch.Tensor"),
    "ids int16": (
        dict(topk_ids=torch.zeros(TOKENS, K, dtype=torch.int16)),
        ArgumentTypeError,
        "topk_ids must be int32 or int64; got torch.int16",
    ),
    "ids uint8": (
        dict(topk_ids=torch.zeros(TOKENS, K, dtype=torch.uint8)),
        ArgumentTypeError,
        "topk_ids must be int32",
    ),
    "ids float": (dict(topk_ids=torch.zeros(TOKENS, K)), ArgumentTypeError, "topk_ids must be int32"),
    "ids one row short": (
        dict(topk_ids=torch.zeros(TOKENS - 1, K, dtype=torch.int64)),
        ArgumentError,
        r"topk_ids must have shape \[6, 'K'\]",
    ),
    "ids without K": (dict(topk_ids=torch.zeros(TOKENS, 0, dtype=torch.int64)), ArgumentError, "K >= 1"),
    "ids flat": (dict(topk_ids=torch.zeros(TOKENS, dtype=torch.int64)), ArgumentError, "topk_ids must have shape"),
    "weights one row short": (
        dict(topk_weights=torch.zeros(TOKENS - 1, K)),
        ArgumentError,
        r"topk_weights must have the shape of topk_ids \[6, 2\]; got \[5, 2\]",
    ),
    "weights other K": (
        dict(topk_weights=torch.zeros(TOKENS, K + 1)),
        ArgumentError,
        "topk_weights must have the shape",
    ),
    "weights bf16": (
        dict(topk_weights=torch.zeros(TOKENS, K).bfloat16()),
        ArgumentTypeError,
        r"topk_weights must be torch.float32.*\.float\(\)",
    ),
    "gate_up flat": (
        dict(gate_up_proj=torch.zeros(2 * INNER, H)),
        ArgumentError,
        r"gate_up_proj must have shape \[E, 2I, 8\]",
    ),
    "gate_up odd": (dict(gate_up_proj=torch.zeros(E, 7, H)), ArgumentError, "gate_up_proj must have shape"),
    "gate_up transposed": (dict(gate_up_proj=torch.zeros(E, H + 1, 2 * INNER)), ArgumentError, "transpose"),
    "gate_up without experts": (
        dict(gate_up_proj=torch.zeros(0, 2 * INNER, H), down_proj=torch.zeros(0, H, INNER)),
        ArgumentError,
        "gate_up_proj must have shape",
    ),
    "down transposed": (
        dict(down_proj=torch.zeros(E, INNER, H)),
        ArgumentError,
        r"down_proj must have shape \[3, 8, 4\]; got \[3, 4, 8\]",
    ),
    "down other E": (dict(down_proj=torch.zeros(E + 1, H, INNER)), ArgumentError, "down_proj must have shape"),
    "gate_up other dtype": (
        dict(gate_up_proj=torch.zeros(E, 2 * INNER, H).bfloat16()),
        ArgumentTypeError,
        "gate_up_proj must be torch.float32",
    ),
    "clamp zero": (dict(swiglu_limit=0.0), ArgumentError, "swiglu_limit must be a number > 0"),
    "clamp nan": (dict(swiglu_limit=float("nan")), ArgumentError, "swiglu_limit"),
    "group of another kind": (
        dict(group="world"),
        ArgumentError,
        "group must come from an initialised torch.distributed",
    ),
    "shared gate_up odd": (
        dict(shared=SharedExperts(torch.zeros(5, H), torch.zeros(H, 2))),
        ArgumentError,
        r"shared.gate_up_proj must have shape \[2S, 8\]",
    ),
    "shared down": (
        dict(shared=SharedExperts(torch.zeros(4, H), torch.zeros(2, H))),
        ArgumentError,
        r"shared.down_proj must have shape \[8, 2\]",
    ),
    "shared gate": (
        dict(shared=SharedExperts(torch.zeros(4, H), torch.zeros(H, 2), torch.zeros(3))),
        ArgumentError,
        r"shared.gate must have shape \[8\]",
    ),
    "shared dtype": (
        dict(shared=SharedExperts(torch.zeros(4, H).double(), torch.zeros(H, 2))),
        ArgumentTypeError,
        "shared.gate_up_proj must be torch.float32",
    ),
    "shared no tensor": (
        dict(shared=SharedExperts(None, torch.zeros(H, 2))),
        ArgumentTypeError,
        "shared.gate_up_proj must be a torch.Tensor",
    ),
    "other device": (
        dict(gate_up_proj=torch.zeros(E, 2 * INNER, H, device="meta")),
        ArgumentError,
        "gate_up_proj must be on the device of x",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(name):
    changes, kind, message = WRONG[name]
    with pytest.raises(kind, match=message) as caught:
        call(**changes)
    assert isinstance(caught.value, MoeloomError) and "got" in str(caught.value)


def test_wrong_main_grad():
    weight = torch.zeros(E, 2 * INNER, H, requires_grad=True)
    weight.main_grad = torch.zeros(E, 2 * INNER, H + 1)
    with pytest.raises(
        ArgumentError, match=r"gate_up_proj.main_grad must be an fp32, bf16 or fp64 tensor of shape \[3, 8, 8\]"
    ):
        call(gate_up_proj=weight)


def test_token_limit():
    with pytest.raises(ArgumentError, match="x must have at most 5 tokens; got 6"):
        call(MoEConfig(max_tokens_per_rank=5))
    call(MoEConfig(max_tokens_per_rank=6))


@pytest.mark.parametrize("bad", [-2, E, 2**40])
def test_checked_ids(bad):
    ids = torch.zeros(TOKENS, K, dtype=torch.int64)
    ids[4, 1] = bad
    with pytest.raises(ArgumentError, match=rf"topk_ids must lie in \[-1, 3\); got {bad} at \[4, 1\]"):
        call(MoEConfig(checked=True), topk_ids=ids)
    call(topk_ids=ids)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_checked_weights(bad):
    weights = torch.zeros(TOKENS, K)
    weights[2, 0] = bad
    with pytest.raises(ArgumentError, match=r"topk_weights must be finite; got (nan|inf) at \[2, 0\]"):
        call(MoEConfig(checked=True), topk_weights=weights)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(backend="fast"), "backend must be one of auto, reference, torch, hopper; got 'fast'"),
        (dict(minibatch_rows=100), "minibatch_rows must be an integer >= 128 and a multiple of 128; got 100. Try 128"),
        (dict(minibatch_rows=0), "minibatch_rows"),
        (dict(minibatch_rows=128, ring_rows=128), "ring_rows must be an integer >= 256"),
        (dict(minibatch_rows=256, ring_rows=640), "ring_rows must be .* multiple of 256; got 640. Try 768"),
        (dict(saved_rows=-128), "saved_rows"),
        (dict(saved_rows=100), "Try 128"),
        (dict(max_tokens_per_rank=0), "max_tokens_per_rank"),
        (dict(timeout_s=-1), "timeout_s must be a number of seconds >= 0"),
        (dict(timeout_s=float("nan")), "timeout_s"),
        (dict(entry_timeout_s="soon"), "entry_timeout_s"),
    ],
)
def test_wrong_config(changes, message):
    with pytest.raises(ArgumentError, match=message):
        MoEConfig(**changes)


def test_deadlines():
    assert (MoEConfig().wait_seconds(entry=True), MoEConfig().wait_seconds(entry=False)) == (60, 30)
    given = MoEConfig(timeout_s=5)
    assert (given.wait_seconds(entry=True), given.wait_seconds(entry=False)) == (5, 5)
    given = MoEConfig(timeout_s=5, entry_timeout_s=0)
    assert (given.wait_seconds(entry=True), given.wait_seconds(entry=False)) == (0, 5)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((0, 4, 4, 1), "hidden_size must be an integer >= 1"),
        ((8, -1, 4, 1), "intermediate_size"),
        ((8, 4, 0, 1), "num_experts"),
        ((8, 4, 4, 5), "top_k must lie in 1..4"),
    ],
)
def test_wrong_sizes_of_the_module(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        MoE(*arguments)


def test_wrong_options_of_the_module():
    with pytest.raises(ArgumentError, match="shared_gate must come with shared_size > 0"):
        MoE(8, 4, 4, 2, shared_gate=True)
    with pytest.raises(ArgumentError, match="scoring must be one of softmax, sigmoid"):
        RouterConfig("relu")
    with pytest.raises(ArgumentError, match="scale must be a finite number > 0"):
        RouterConfig(scale=0)


def test_a_refused_call_changes_nothing():
    inputs = Case(tokens=TOKENS, hidden=H, inner=INNER, experts=E, top_k=K).make()
    before = call()
    for changes, kind, _ in WRONG.values():
        with pytest.raises(kind):
            call(**changes)
    assert torch.equal(call(), before) and inputs is not None
