"""The hopper backend: the whole forward after the router as a schedule and one persistent kernel, on NVIDIA Hopper.

Two launches make the schedule (:mod:`moeloom.kernels.schedule`), one does all the work
(:mod:`moeloom.kernels.forward`). Shared experts are not inside of that one yet: they are dense products before it, and
the ordered sum begins with their output in fp32.

The host never learns the routing, so a call can be captured into a CUDA graph, once the kernels are compiled and the
memory is there: call once before the capture. The memory beside what a call returns is a workspace that calls of one
shape share; it holds the slots, [T * K, H], and a ring of few rows.

Backward is that of the torch backend on the pre-activations that this forward makes.

Determinism: equal bits of everything that forward returns for equal inputs: run after run, and for every
``minibatch_rows``, ``ring_rows``, ``saved_rows`` and number of SMs. Backward: as the torch backend.

Nothing here imports Triton before the first call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moeloom.backends.call import Gradients, LayerCall, Request, Wanted
from moeloom.backends.hopper.saved import SavedCall
from moeloom.errors import ToolchainError

MOST_TOP_K, MOST_EXPERTS = 16, 512


def why_unsupported(request: Request) -> str | None:
    """Return why this backend cannot run a call, or None if it can."""
    if request.device.type != "cuda":
        return f"the device is '{request.device.type}', not CUDA"
    return _why_unsupported(request, torch.cuda.get_device_capability(request.device)) or _no_toolchain()


@functools.lru_cache(maxsize=256)
def _why_unsupported(request: Request, capability: tuple[int, int]) -> str | None:
    rules = (
        (capability == (9, 0), f"the device has compute capability {capability[0]}.{capability[1]}, not 9.0"),
        (request.dtype == torch.bfloat16, f"operands are {request.dtype}, not torch.bfloat16"),
        (request.hidden % 64 == 0, f"H = {request.hidden} is no multiple of 64"),
        (request.inner % 64 == 0, f"I = {request.inner} is no multiple of 64"),
        (request.top_k <= MOST_TOP_K, f"top_k = {request.top_k} is more than {MOST_TOP_K}"),
        (
            request.local_experts <= MOST_EXPERTS,
            f"{request.local_experts} experts on a rank are more than {MOST_EXPERTS}",
        ),
        (request.ranks == 1, f"the EP group has {request.ranks} ranks; this version takes one"),
    )
    return next((reason for holds, reason in rules if not holds), None)


@functools.cache
def _no_toolchain() -> str | None:
    try:
        import moeloom.compat  # noqa: F401
    except ToolchainError as error:
        return str(error)
    return None


def forward(call: LayerCall, *, save: bool) -> tuple[Tensor, SavedCall | None]:
    """Run the layer; see :func:`moeloom.backends.hopper.forward_pass.run_forward`."""
    from moeloom.backends.hopper.forward_pass import run_forward

    return run_forward(call, save=save)


def backward(call: LayerCall, saved: SavedCall, d_out: Tensor, wanted: Wanted) -> Gradients:
    """Compute the gradients of one call; see :func:`moeloom.backends.hopper.backward_pass.run_backward`."""
    from moeloom.backends.hopper.backward_pass import run_backward

    return run_backward(call, saved, d_out, wanted)


__all__ = ["backward", "forward", "why_unsupported"]
