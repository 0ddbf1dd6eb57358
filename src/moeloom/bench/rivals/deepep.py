"""DeepEP (deepseek-ai/DeepEP, version 2: ``ElasticBuffer``) for the transport, our backend for the experts.

Written from its public documentation and never run by us: no machine of ours had the package and several GPUs at the
same time. Like every rival it is checked against fp64 before it is timed, so a mistake here shows as a refusal and not
as a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeloom.bench.inputs import Problem
from moeloom.bench.rivals.base import (
    SHARED_BESIDE,
    Contender,
    Place,
    Rival,
    RivalOptions,
    lacks_package,
    needs_bf16,
    needs_gpu,
    needs_ranks,
    version,
)
from moeloom.config import MoEConfig
from moeloom.functional import moe


class _Dispatch(torch.autograd.Function):
    """Send each token to the ranks that own its experts; backward adds up what comes back."""

    @staticmethod
    def forward(ctx, buffer, facts: dict, x: Tensor, ids: Tensor, weights: Tensor):
        got_x, got_ids, got_weights, handle, event = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **facts)
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(got_ids)
        return got_x, got_ids, got_weights, handle

    @staticmethod
    def backward(ctx, d_x: Tensor, _ids, d_weights: Tensor, _handle):
        d_x, d_weights, event = ctx.buffer.combine(
            d_x.contiguous(), handle=ctx.handle, topk_weights=d_weights.contiguous()
        )
        event.current_stream_wait()
        return None, None, d_x, None, d_weights


class _Combine(torch.autograd.Function):
    """Add up each token's results on its own rank; backward sends the gradient along the same ways."""

    @staticmethod
    def forward(ctx, buffer, handle, y: Tensor) -> Tensor:
        out, _, event = buffer.combine(y, handle=handle)
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor):
        d_y, _, _, _, event = ctx.buffer.dispatch(d_out.contiguous(), handle=ctx.handle)
        event.current_stream_wait()
        return None, None, d_y


class DeepEPContender(Contender):
    """Dispatch, the experts of this rank on what arrived, combine."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        from deep_ep import ElasticBuffer

        tokens, hidden = problem.x.shape
        top_k = problem.ids.shape[1]
        most = max(problem.group.gather_json(tokens, seconds=60.0))
        self._buffer = ElasticBuffer(problem.process_group, num_max_tokens_per_rank=most, hidden=hidden, num_topk=top_k)
        self._facts = dict(num_experts=problem.num_experts, num_max_tokens_per_rank=most)
        self._config = MoEConfig(backend="torch")
        notes = [version("deep-ep"), "experts by moeloom-torch"]
        notes += [SHARED_BESIDE] if problem.shared is not None else []
        self.note = "; ".join(notes)

    def forward(self) -> Tensor:
        """Run the three parts."""
        leaves = self.leaves
        x, ids, weights, handle = _Dispatch.apply(
            self._buffer, self._facts, leaves["x"], self.problem.ids, leaves["topk_weights"]
        )
        # What arrives speaks of local experts; -1 marks routes to other ranks.
        y = moe(
            x,
            ids.to(torch.int64),
            weights,
            leaves["gate_up_proj"],
            leaves["down_proj"],
            swiglu_limit=self.problem.point.shape.swiglu_limit,
            config=self._config,
        )
        return self.add_shared(_Combine.apply(self._buffer, handle, y))


class DeepEP(Rival):
    """The transport library of DeepSeek."""

    name = backend = "deepep"

    def missing(self, place: Place) -> str | None:
        """Needs its package, several CUDA devices and bf16."""
        reasons = needs_gpu(place), needs_ranks(place), needs_bf16(place), lacks_package("deep_ep", "deep-ep")
        found = next((reason for reason in reasons if reason), None)
        # The name on PyPI is a stub.
        return found and found.replace("pip install deep-ep", "build github.com/deepseek-ai/DeepEP")

    def prepare(self, problem: Problem, options: RivalOptions) -> Contender:
        """Allocate its buffers; all ranks together."""
        return DeepEPContender(problem)
