"""Options of ``moeloom train``: presets, configuration files, command line, in that order of rising precedence."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from moeloom.config import BACKENDS
from moeloom.errors import ArgumentError, complain
from moeloom.train.model import ModelConfig, refuse_unknown

DTYPES = ("auto", "fp32", "bf16")


@dataclass(frozen=True)
class Options:
    """Everything that decides the course of a training.

    Attributes:
        model: sizes of the model.
        steps: optimiser steps.
        minutes: stop after this much training time instead; the learning rate then follows the clock. None: by steps.
        batch: sequences of a step, over all ranks and micro-batches.
        seq: bytes of a sequence.
        grad_accum: micro-batches that a step is cut into.
        lr: peak learning rate; warm-up over ``warmup`` steps (or that share of the time), then cosine to 2 % of it.
        embedding_lr: factor on the learning rate of byte and n-gram embeddings, whose rows are seen seldom.
        weight_decay, clip, aux_loss, bias_rate: AdamW decay, gradient norm limit, factor of the auxiliary loss,
            step of the selection bias (sigmoid routers).
        seed: of weights and batches.
        eval_every, eval_bytes: steps between validations, and bytes of text each of them looks at.
        save_every: steps between checkpoints.
        dtype: ``"fp32"``, ``"bf16"`` (autocast), or ``"auto"``: bf16 on a GPU.
        backend: of the MoE layers.
        data: file or folder, or None for the standard library's sources.
    """

    model: ModelConfig
    steps: int = 1000
    minutes: float | None = None
    batch: int = 8
    seq: int = 256
    grad_accum: int = 1
    lr: float = 3e-3
    warmup: int = 50
    embedding_lr: float = 20.0
    weight_decay: float = 0.1
    clip: float = 1.0
    aux_loss: float = 0.01
    bias_rate: float = 1e-3
    seed: int = 0
    eval_every: int = 200
    eval_bytes: int = 65536
    save_every: int = 200
    dtype: str = "auto"
    backend: str = "auto"
    data: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seq", "grad_accum", "eval_every", "eval_bytes", "save_every"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                _refuse(name, "be an integer >= 1", getattr(self, name))
        for name in ("lr", "clip", "embedding_lr"):
            if not 0 < getattr(self, name) < math.inf:
                _refuse(name, "be a number > 0", getattr(self, name))
        for name in ("warmup", "weight_decay", "aux_loss", "bias_rate", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                _refuse(name, "be >= 0", getattr(self, name))
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            _refuse("minutes", "be a number > 0", self.minutes)
        if self.dtype not in DTYPES:
            _refuse("dtype", f"be one of {', '.join(DTYPES)}", self.dtype)
        if self.backend not in BACKENDS:
            _refuse("backend", f"be one of {', '.join(BACKENDS)}", self.backend)
        if self.batch % self.grad_accum:
            raise ArgumentError(
                complain("batch", "be a multiple of grad_accum", f"{self.batch} and {self.grad_accum}", "Change one.")
            )

    def to_dict(self) -> dict:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Options:
        """Undo :meth:`to_dict`; unknown names are an error."""
        refuse_unknown(cls, values, "the configuration")
        model = values["model"]
        return cls(**{**values, "model": model if isinstance(model, ModelConfig) else ModelConfig.from_dict(model)})


#: Sizes and schedules by name. ``tiny`` learns within three minutes on two CPU cores; ``small`` wants a GPU; ``smoke``
#: is for tests and takes seconds.
PRESETS: dict[str, Options] = {
    "smoke": Options(
        model=ModelConfig(width=32, layers=2, heads=2, experts=4, top_k=2, expert_width=32, ngram_slots=512),
        steps=20,
        batch=4,
        seq=64,
        warmup=5,
        eval_every=10,
        eval_bytes=4096,
        save_every=10,
    ),
    "tiny": Options(
        model=ModelConfig(width=128, layers=3, heads=4, experts=8, top_k=2, expert_width=128, ngram_slots=8192),
        steps=500,
        batch=8,
        seq=256,
    ),
    "small": Options(
        model=ModelConfig(
            width=384, layers=6, heads=6, experts=16, top_k=2, expert_width=384, shared_width=384, ngram_slots=32768
        ),
        steps=400,
        batch=32,
        seq=512,
        lr=2e-3,
        warmup=50,
        eval_every=100,
        eval_bytes=262144,
    ),
}


def build_options(preset: str, config_file: str | None, overrides: dict) -> Options:
    """Return preset, then file, then overrides (None values are skipped).

    Args:
        preset: a name in :data:`PRESETS`.
        config_file: JSON with any of the names of :class:`Options`; ``model`` may name some of its sizes only.
        overrides: by name.

    Raises:
        ArgumentError: unknown preset or name, unreadable file, or a value that breaks its rule.
    """
    if preset not in PRESETS:
        raise ArgumentError(complain("--preset", f"be one of {', '.join(PRESETS)}", repr(preset), "Fix the name."))
    values = PRESETS[preset].to_dict()
    for layer in (_read(config_file) if config_file else {}, {k: v for k, v in overrides.items() if v is not None}):
        model = layer.get("model", {})
        if not isinstance(model, dict):
            raise ArgumentError(
                complain("model", "be a table of sizes", repr(model), 'Write {"model": {"width": 128}}.')
            )
        values = {**values, **layer, "model": {**values["model"], **model}}
    return Options.from_dict(values)


def _read(path: str) -> dict:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            complain("--config", "name a readable JSON file", f"'{path}': {error}", "Fix the file.")
        ) from error
    if not isinstance(values, dict):
        raise ArgumentError(complain("--config", "hold one JSON object", type(values).__name__, "Write {...}."))
    return values


def _refuse(name: str, rule: str, got: object) -> None:
    raise ArgumentError(complain(name, rule, repr(got), "Change the option."))
