"""Shapes of the models that benchmarks speak of. A leaf: plain Python.

Only what the MoE layer sees: sizes, shared expert, clamp. ``-scaled`` versions keep the number of experts and top-k,
and divide the three widths by 64, so that routing is that of the real model and any machine can run them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moeloom.errors import ArgumentError, complain

#: Width divisor of ``-scaled`` shapes: the largest power of two that leaves every width a multiple of 16, which grouped
#: products need; two CPU cores then do 8192 tokens in well under a second.
SCALE = 64
SUFFIX = "-scaled"


@dataclass(frozen=True)
class ModelShape:
    """The MoE layer of one model.

    Attributes:
        name: as given to ``--model``.
        hidden: H.
        inner: I, width of a routed expert.
        experts: routed experts of the whole model.
        top_k: routes of a token.
        shared: S, width of all shared experts together.
        shared_gate: the shared output is multiplied by ``sigmoid(x . g)``.
        swiglu_limit: clamp before the activation, or None.
    """

    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    shared: int
    shared_gate: bool = False
    swiglu_limit: float | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether the widths are not those of the real model."""
        return self.name.endswith(SUFFIX)

    def scaled(self) -> ModelShape:
        """Return the small version, or this shape if it is one."""
        if self.is_scaled:
            return self
        return replace(
            self,
            name=self.name + SUFFIX,
            hidden=self.hidden // SCALE,
            inner=self.inner // SCALE,
            shared=self.shared // SCALE,
        )

    def useful_flops(self, tokens: int, routes: int, pass_: str, shared: bool) -> int:
        """Floating-point operations that a layer cannot do without: products only, no padding.

        Args:
            tokens: tokens that the shared expert sees.
            routes: routes that are computed; a token has up to ``top_k``.
            pass_: ``"fwd"``, ``"bwd"`` or ``"fwd+bwd"``; backward is twice forward.
            shared: count the shared expert.
        """
        forward = 6 * self.hidden * (routes * self.inner + (tokens * self.shared if shared else 0))
        return forward * PASSES[pass_]


#: Passes, and how many times the products of forward each of them does.
PASSES = {"fwd": 1, "bwd": 2, "fwd+bwd": 3}

MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("kimi-k2.7-code", 7168, 2048, 384, 8, shared=2048),
        ModelShape("glm-5.2", 6144, 2048, 256, 8, shared=2048),
        ModelShape("qwen3.5-397b-a17b", 4096, 1024, 512, 10, shared=1024, shared_gate=True),
        ModelShape("deepseek-v4-pro", 7168, 3072, 384, 6, shared=3072, swiglu_limit=10.0),
    )
}


def find_model(name: str) -> ModelShape:
    """Return a shape by its name.

    Raises:
        ArgumentError: no such model.
    """
    base = name.removesuffix(SUFFIX)
    if base not in MODELS:
        rule = f"be one of {', '.join(MODELS)}, each also with {SUFFIX}"
        raise ArgumentError(complain("--model", rule, repr(name), "Fix the name."))
    shape = MODELS[base]
    return shape.scaled() if name != base else shape
