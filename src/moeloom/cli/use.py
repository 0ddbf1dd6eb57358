"""``moeloom generate`` and ``moeloom eval``: a trained model, in one process, whatever number of ranks wrote it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from moeloom.cli.devices import pick_device
from moeloom.errors import ArgumentError, complain
from moeloom.runtime.ep_group import resolve_group
from moeloom.train.checkpoint import MANIFEST, Checkpoint, CheckpointStore
from moeloom.train.model import MoELanguageModel
from moeloom.train.options import Options
from moeloom.train.snapshot import load_snapshot


def run_generate(checkpoint: str, prompt: str, length: int, temperature: float, seed: int, device: str) -> int:
    """Print ``prompt`` and its continuation."""
    from moeloom.train.sampling import generate

    model, options, _ = _load(checkpoint, device)
    text = generate(model, prompt.encode(), length, context=options.seq, temperature=temperature, seed=seed)
    sys.stdout.write(text.decode("utf-8", errors="replace") + "\n")
    return 0


def run_eval(checkpoint: str, data: str | None, device: str) -> int:
    """Print bits per byte of the model and of simpler methods on the same validation text."""
    from moeloom.train.baselines import compute_baselines
    from moeloom.train.data import load_text
    from moeloom.train.evaluation import bits_per_byte

    model, options, opened = _load(checkpoint, device)
    corpus = load_text(data if data is not None else options.data)
    print(corpus.describe(), flush=True)
    if corpus.sha256 != opened.state.get("corpus_sha256"):
        print("note: this is not the text that the model was trained on", flush=True)
    bits = bits_per_byte(model, corpus.valid, seq=options.seq, group=resolve_group(None))
    simple = compute_baselines(corpus)
    others = ", ".join(f"{name} {value:.3f}" for name, value in simple.named().items())
    print(f"step {opened.step}: {bits:.3f} bits/byte; {others}")
    return 0


def _load(path: str, device: str) -> tuple[MoELanguageModel, Options, Checkpoint]:
    """Open a checkpoint folder, or the newest checkpoint of a training's folder, and build its model."""
    folder = Path(path)
    target = pick_device(device)
    if (folder / MANIFEST).exists():
        checkpoint: Checkpoint | None = Checkpoint.open(folder)
    else:
        inner = folder / "checkpoints"
        checkpoint = CheckpointStore(inner if inner.is_dir() else folder).latest()
    if checkpoint is None:
        raise ArgumentError(
            complain("CHECKPOINT", "name a checkpoint or a training's folder", f"'{path}'", "Check the path.")
        )
    options = Options.from_dict(checkpoint.state["options"])
    model = MoELanguageModel(options.model)
    load_snapshot(checkpoint, model, torch.optim.AdamW(model.parameters()))
    return model.to(target).eval(), options, checkpoint
