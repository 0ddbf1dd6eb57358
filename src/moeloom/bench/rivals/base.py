"""What a rival is to the benchmark: a name, a reason why it cannot run here, and a contender made from a problem."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from moeloom.bench.inputs import Problem
from moeloom.bench.oracle import swiglu
from moeloom.bench.timing import Step
from moeloom.functional import SharedExperts

#: Said of rivals that have no shared expert of their own.
SHARED_BESIDE = "shared expert by torch beside it"


@dataclass(frozen=True)
class RivalOptions:
    """Options of rivals.

    Attributes:
        sonicmoe_tiles: ``"default"`` pins one tile configuration, ``"all"`` lets its tuner try what it offers.
    """

    sonicmoe_tiles: str = "default"


class Contender(ABC):
    """A rival holding the tensors of one problem, ready to be called.

    Leaves are the problem's tensors without copies, and require gradients; so forward keeps what backward needs.

    Attributes:
        note: what a reader of the record must know, or None.
        is_layer: False for work that is no MoE layer and so has no right or wrong result.
    """

    is_layer = True

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.note: str | None = None
        given = {
            "x": problem.x,
            "topk_weights": problem.weights,
            "gate_up_proj": problem.gate_up,
            "down_proj": problem.down,
        }
        if problem.shared is not None:
            given |= {"shared_gate_up": problem.shared.gate_up_proj, "shared_down": problem.shared.down_proj}
            given |= {"shared_gate": problem.shared.gate} if problem.shared.gate is not None else {}
        self.leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}

    @abstractmethod
    def forward(self) -> Tensor:
        """Compute ``out`` [T, H] from ids, keeping what backward needs."""

    def backward(self, out: Tensor) -> None:
        """Compute all gradients from what :meth:`forward` returned."""
        out.backward(self.problem.d_out)

    def clear(self) -> None:
        """Drop the gradients, so that the next backward stores new ones."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Return all gradients by the names of :func:`~moeloom.bench.oracle.dense`, in its layout."""
        return {f"d_{name}": leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are there now."""
        return sum(leaf.grad.nbytes for leaf in self.leaves.values() if leaf.grad is not None)

    def results(self, *, backward: bool) -> dict[str, Tensor]:
        """Call once and return ``out`` and, with ``backward``, all gradients. Missing gradients are left out."""
        self.clear()
        out = self.forward()
        if not backward:
            return {"out": out.detach()}
        self.backward(out)
        found = {"out": out.detach()} | self.gradients()
        self.clear()
        return found

    def step(self, name: str, pass_: str) -> Step:
        """Return what to time for a pass.

        Args:
            name: of the contender in the round.
            pass_: ``"fwd"``, ``"bwd"`` (forward is run untimed before it) or ``"fwd+bwd"``.
        """
        if pass_ == "fwd":
            return Step(name, lambda: None, lambda _: self.forward(), self.clear)
        if pass_ == "bwd":
            return Step(name, self.forward, self.backward, self.clear)
        return Step(name, lambda: None, lambda _: self.backward(self.forward()), self.clear)

    def add_shared(self, out: Tensor) -> Tensor:
        """Add the shared expert by plain torch, for rivals that have none. Differentiable."""
        if self.problem.shared is None:
            return out
        x, limit = self.leaves["x"], self.problem.point.shape.swiglu_limit
        y = swiglu(x, self.leaves["shared_gate_up"], self.leaves["shared_down"], limit)
        if "shared_gate" in self.leaves:
            y = y * torch.sigmoid(x @ self.leaves["shared_gate"])[:, None]
        return out + y

    def shared_leaves(self) -> SharedExperts | None:
        """Return the shared experts' leaves in the form that our layer takes."""
        if self.problem.shared is None:
            return None
        return SharedExperts(self.leaves["shared_gate_up"], self.leaves["shared_down"], self.leaves.get("shared_gate"))


@dataclass(frozen=True)
class Place:
    """Where the benchmark runs, as far as a rival cares.

    Attributes:
        device: of this rank.
        dtype: of operands.
        ranks: of the EP group.
    """

    device: torch.device
    dtype: torch.dtype
    ranks: int = 1


class Rival(ABC):
    """Something to measure.

    Attributes:
        name: as given to ``--against``.
        backend: as written in records.
    """

    name: str
    backend: str

    @abstractmethod
    def missing(self, place: Place) -> str | None:
        """Return why it cannot run here and what to do about it, or None if it can. Imports nothing large."""

    @abstractmethod
    def prepare(self, problem: Problem, options: RivalOptions) -> Contender:
        """Make it ready for a problem; may raise anything."""


def lacks_package(module: str, package: str) -> str | None:
    """Return what to install if a module cannot be found."""
    if importlib.util.find_spec(module) is None:
        return f"Python package {package} is not installed: pip install {package}"
    return None


def needs_gpu(place: Place) -> str | None:
    """Return the reason if this is no CUDA device."""
    return None if place.device.type == "cuda" else "needs a CUDA device"


def needs_bf16(place: Place) -> str | None:
    """Return the reason if operands are not bf16."""
    return None if place.dtype == torch.bfloat16 else "needs --dtype bf16"


def needs_one_rank(place: Place) -> str | None:
    """Return the reason if the experts are spread over ranks."""
    return None if place.ranks == 1 else "computes on one rank only; it does not communicate"


def needs_ranks(place: Place) -> str | None:
    """Return the reason if there is nobody to communicate with."""
    return None if place.ranks > 1 else "communicates between GPUs: start it with torchrun on 2 or more"


def version(package: str) -> str:
    """Return ``"package X.Y"`` for notes."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} of unknown version"
