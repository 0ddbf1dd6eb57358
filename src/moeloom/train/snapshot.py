"""The training state as named tensors: replicated ones written by rank 0, experts by the rank that holds them.

Experts carry their global number in their name, so a checkpoint written by n ranks loads on any other number of ranks:
``model.blocks.0.moe.experts.5.gate_up_proj`` and ``adam.exp_avg.blocks.0.moe.experts.5.gate_up_proj``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from moeloom.layer import MoE
from moeloom.train.checkpoint import Checkpoint

_MOMENTS = ("exp_avg", "exp_avg_sq")


def named_pieces(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    """Yield (name, parameter, local expert or None) for every piece of the model that this rank holds."""
    expert_of = {}
    for module_name, module in model.named_modules():
        if isinstance(module, MoE):
            for name in ("gate_up_proj", "down_proj"):
                expert_of[f"{module_name}.{name}"] = module
    for name, parameter in model.named_parameters():
        layer = expert_of.get(name)
        if layer is None:
            yield name, parameter, None
        else:
            prefix, short = name.rsplit(".", 1)
            for local in range(parameter.shape[0]):
                yield f"{prefix}.experts.{layer.first_expert + local}.{short}", parameter, local


def take_snapshot(model: nn.Module, optimizer: torch.optim.AdamW, rank: int) -> dict[str, Tensor]:
    """Return what this rank writes: its experts, and on rank 0 everything that is replicated.

    Args:
        model: with :class:`~moeloom.MoE` layers.
        optimizer: AdamW over the parameters of ``model``.
        rank: in the EP group.
    """
    tensors = {}
    for name, parameter, local in named_pieces(model):
        if local is None and rank:
            continue
        tensors[f"model.{name}"] = _piece(parameter.detach(), local)
        for moment, value in _moments(optimizer, parameter).items():
            tensors[f"adam.{moment}.{name}"] = _piece(value, local)
    if rank == 0:
        for name, buffer in model.named_buffers():
            if name.endswith("selection_bias"):
                tensors[f"model.{name}"] = buffer
    return tensors


def load_snapshot(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.AdamW | None) -> None:
    """Load this rank's pieces, whatever the number of ranks that wrote them.

    Args:
        checkpoint: opened.
        model: of the same configuration.
        optimizer: AdamW whose moments are restored, or None to load weights only.

    Raises:
        CheckpointError: a tensor is missing or has another shape or dtype.
    """
    targets: dict[str, Tensor] = {}
    for name, parameter, local in named_pieces(model):
        targets[f"model.{name}"] = _piece(parameter.detach(), local)
        if optimizer is not None:
            for moment, value in _moments(optimizer, parameter).items():
                targets[f"adam.{moment}.{name}"] = _piece(value, local)
    for name, buffer in model.named_buffers():
        if name.endswith("selection_bias"):
            targets[f"model.{name}"] = buffer
    checkpoint.check(_whole_model(model))
    loaded = checkpoint.load_many(targets)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(loaded[name])


def _whole_model(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return (shape, dtype) by name of everything that all ranks together write."""
    expected = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    for name, parameter, local in named_pieces(model):
        names = [name]
        if local is not None:
            prefix, _, short = name.partition(".experts.")
            short = short.split(".", 1)[1]
            names = [f"{prefix}.experts.{e}.{short}" for e in range(layers[prefix].num_experts)]
        piece = _piece(parameter, local)
        for each in names:
            expected[f"model.{each}"] = (piece.shape, piece.dtype)
            expected |= {f"adam.{moment}.{each}": (piece.shape, piece.dtype) for moment in _MOMENTS}
    for name, buffer in model.named_buffers():
        if name.endswith("selection_bias"):
            expected[f"model.{name}"] = (buffer.shape, buffer.dtype)
    return expected


def _piece(tensor: Tensor, local: int | None) -> Tensor:
    return tensor if local is None else tensor[local]


def _moments(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return AdamW's moments of one parameter, made (as zeros, like AdamW does) where no step was taken yet."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for moment in _MOMENTS:
            state[moment] = torch.zeros_like(parameter)
    return {moment: state[moment] for moment in _MOMENTS}


def set_optimizer_step(optimizer: torch.optim.AdamW, step: int) -> None:
    """Set AdamW's step count, which bias correction depends on, for every parameter."""
    for state in optimizer.state.values():
        state["step"].fill_(float(step))
