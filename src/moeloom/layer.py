"""The layer as a module: :class:`MoE` = router + experts + optional shared experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moeloom.config import MoEConfig
from moeloom.errors import ArgumentError, complain
from moeloom.functional import SharedExperts, moe
from moeloom.router import Router, RouterConfig, Routing
from moeloom.runtime.ep_group import resolve_group


class MoE(nn.Module):
    """Mixture-of-experts layer with SwiGLU experts in Hugging Face layout.

    Args:
        hidden_size: H.
        intermediate_size: I of a routed expert.
        num_experts: experts of the whole EP group, a multiple of its size.
        top_k: experts of a token.
        router: scoring and choice; default softmax, renormalised.
        shared_size: total width of the shared experts, 0 for none.
        shared_gate: multiply the shared output by ``sigmoid(x . g)``.
        swiglu_limit: clamp before the activation, None for none.
        group: EP group, or None for one process. Rank r of n holds experts r * E/n .. (r+1) * E/n - 1.
        config: options of the layer call.
        device, dtype: of the expert weights; the router is fp32.

    Attributes:
        router: :class:`~moeloom.router.Router`.
        gate_up_proj: [E / n, 2I, H]; down_proj: [E / n, H, I].
        shared_gate_up_proj: [2S, H] or None; shared_down_proj: [H, S] or None; shared_gate: [H] or None.

    Raises:
        ArgumentError: sizes that do not fit together.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        router: RouterConfig | None = None,
        shared_size: int = 0,
        shared_gate: bool = False,
        swiglu_limit: float | None = None,
        group: dist.ProcessGroup | None = None,
        config: MoEConfig | None = None,
        device=None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = dict(hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts)
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(
                    complain(name, "be an integer >= 1", repr(value), "Check the model's configuration.")
                )
        self._ep = resolve_group(group)
        if num_experts % self._ep.size:
            fix = "Use a group whose size divides it."
            raise ArgumentError(
                complain("num_experts", f"be a multiple of the EP group's size {self._ep.size}", num_experts, fix)
            )
        if shared_gate and not shared_size:
            raise ArgumentError(
                complain("shared_gate", "come with shared_size > 0", "shared_size=0", "Give the width.")
            )
        self.num_experts, self.swiglu_limit, self.config = num_experts, swiglu_limit, config or MoEConfig()
        self.router = Router(hidden_size, num_experts, top_k, router, device=device)
        local = num_experts // self._ep.size
        kwargs = dict(device=device, dtype=dtype)
        self.gate_up_proj = nn.Parameter(torch.empty(local, 2 * intermediate_size, hidden_size, **kwargs))
        self.down_proj = nn.Parameter(torch.empty(local, hidden_size, intermediate_size, **kwargs))
        self.register_parameter("shared_gate_up_proj", None)
        self.register_parameter("shared_down_proj", None)
        self.register_parameter("shared_gate", None)
        if shared_size:
            self.shared_gate_up_proj = nn.Parameter(torch.empty(2 * shared_size, hidden_size, **kwargs))
            self.shared_down_proj = nn.Parameter(torch.empty(hidden_size, shared_size, **kwargs))
        if shared_gate:
            self.shared_gate = nn.Parameter(torch.empty(hidden_size, **kwargs))
        self.reset_parameters()

    @property
    def first_expert(self) -> int:
        """Global id of the first expert of this rank."""
        return self._ep.rank * self.gate_up_proj.shape[0]

    def reset_parameters(self) -> None:
        """Draw every weight from N(0, 1/fan_in).

        Each expert has a generator of its own, seeded by one draw from the default generator and its global id. Ranks
        that start from the same seed therefore build the same experts at every size of the EP group.
        """
        self.router.reset_parameters()
        for weight in (self.shared_gate_up_proj, self.shared_down_proj):
            if weight is not None:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        if self.shared_gate is not None:
            nn.init.zeros_(self.shared_gate)
        seed = int(torch.randint(2**62, ()))
        if self.gate_up_proj.is_meta:
            return
        with torch.no_grad():
            for local in range(self.gate_up_proj.shape[0]):
                generator = torch.Generator().manual_seed(seed + self.first_expert + local)
                for weight in (self.gate_up_proj[local], self.down_proj[local]):
                    draw = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
                    weight.copy_(draw * weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """Run the layer.

        Args:
            x: [..., H].
            return_routing: also return what the router decided, with its auxiliary loss.

        Returns:
            [..., H], or that and the :class:`~moeloom.router.Routing`.
        """
        routing = self.router(x)
        out = self.experts(x, routing.topk_ids, routing.topk_weights)
        return (out, routing) if return_routing else out

    def experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Run the experts, shared ones included, on given routes; see :func:`moeloom.moe`."""
        shared = None
        if self.shared_gate_up_proj is not None:
            shared = SharedExperts(self.shared_gate_up_proj, self.shared_down_proj, self.shared_gate)
        return moe(
            x,
            topk_ids,
            topk_weights,
            self.gate_up_proj,
            self.down_proj,
            shared=shared,
            swiglu_limit=self.swiglu_limit,
            group=self._ep,
            config=self.config,
        )

    def expert_parameters(self) -> list[nn.Parameter]:
        """Parameters that this rank alone holds; all others are replicated over the EP group."""
        return [self.gate_up_proj, self.down_proj]

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        local, two_i, hidden = self.gate_up_proj.shape
        return (
            f"hidden_size={hidden}, intermediate_size={two_i // 2}, num_experts={self.num_experts} ({local} here), "
            f"top_k={self.router.top_k}"
        )
