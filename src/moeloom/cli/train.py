"""``moeloom train``."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from moeloom.errors import ArgumentError, complain
from moeloom.runtime.ep_group import resolve_group
from moeloom.train.checkpoint import Checkpoint, CheckpointStore
from moeloom.train.options import Options, build_options
from moeloom.train.processes import join_group, start_ranks, world_size

RUNS = Path("runs")
#: More threads than this slow the small default model down: on 16 cores 2, 4, 8 and 16 threads gave 12,300, 18,300,
#: 20,700 and 17,500 tokens/s. OMP_NUM_THREADS overrides it.
MOST_THREADS = 8
#: Seconds that ranks may take to load before they first meet.
ENTRY_SECONDS = 120.0


def run(
    *, preset: str, overrides: dict, config: str | None, ep: int | None, out: str | None, resume: bool, device: str
) -> int:
    """Check everything that can be checked, then train, here or in the processes of an EP group."""
    from moeloom.cli.devices import pick_device

    if ep is not None and ep < 1:
        raise ArgumentError(complain("--ep", "be an integer >= 1", ep, "Use 1 for one process."))
    started_here = world_size() == 1 and (ep or 1) > 1
    target = pick_device(device, rank=0 if started_here else None)
    folder = _out_folder(out, resume)
    checkpoint = _newest(folder) if resume else None
    usual = "small" if target.type == "cuda" else "tiny"
    options = _options(preset or usual, config, overrides, checkpoint, bool(preset))
    if not resume:
        _refuse_used(folder)
    if started_here:
        if options.batch % (ep * options.grad_accum) or options.model.experts % ep:
            rule = f"divide the {options.model.experts} experts, and times grad_accum the batch of {options.batch}"
            raise ArgumentError(complain("--ep", rule, ep, "Use another number of processes."))
        return start_ranks(ep, sys.argv[1:] if out is not None else [*sys.argv[1:], "--out", str(folder)])
    return _train(options, checkpoint, folder, ep, target)


def _train(options: Options, checkpoint: Checkpoint | None, folder: Path, ep: int | None, device) -> int:
    """Train on this rank."""
    import torch

    from moeloom.train.data import load_text
    from moeloom.train.loop import Trainer
    from moeloom.train.report import Reporter

    started = time.monotonic()
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), MOST_THREADS))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Attention's backward adds in a fixed order only in this strict mode.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    group = join_group(ep)
    ranks = resolve_group(group)
    reporter = Reporter(silent=ranks.rank != 0)
    corpus = load_text(options.data)
    reporter.say(corpus.describe())
    # Ranks that torchrun started each looked for a free folder; that of rank 0 counts.
    folder = Path(ranks.gather_json(str(folder), seconds=ENTRY_SECONDS)[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(complain("--out", "name a folder that can be made", error, "Choose another.")) from error
    trainer = Trainer(options, corpus, folder, group=group, device=device, resume=checkpoint, reporter=reporter)
    count = sum(p.numel() for p in trainer.model.parameters())
    model = options.model
    reporter.say(
        f"model: {model.layers} layers, width {model.width}, {model.experts} experts top-{model.top_k} of width "
        f"{model.expert_width}, {count / 1e6:.2f} M parameters on this rank; {trainer.ep.size} rank(s) on {device}"
    )
    if checkpoint is not None:
        reporter.say(f"continuing after step {checkpoint.step} from {checkpoint.path}")
    result = trainer.run()
    reporter.say(f"{result.step} steps, {time.monotonic() - started:.1f} s in all")
    return 0


def _options(preset: str, config: str | None, overrides: dict, checkpoint: Checkpoint | None, named: bool) -> Options:
    """Return the options of a new run, or those of the checkpoint with what the command line overrides."""
    if checkpoint is None:
        return build_options(preset, config, overrides)
    if named or config:
        raise ArgumentError(
            "--resume takes preset and configuration from the checkpoint; leave --preset and --config out."
        )
    given = {name: value for name, value in overrides.items() if value is not None}
    return Options.from_dict({**checkpoint.state["options"], **given})


def _out_folder(out: str | None, resume: bool) -> Path:
    """Return ``--out``, or the next free (to resume: the last) of runs/001, runs/002, ..."""
    if out is not None:
        return Path(out)
    taken = [int(p.name) for p in RUNS.iterdir() if re.fullmatch(r"\d{3,}", p.name)] if RUNS.is_dir() else []
    if resume and not taken:
        raise ArgumentError(
            complain("--resume", "find a run", f"none in '{RUNS}'", "Pass --out, or train without --resume.")
        )
    return RUNS / f"{max(taken, default=0) + (0 if resume else 1):03d}"


def _newest(folder: Path) -> Checkpoint:
    store = CheckpointStore(folder / "checkpoints")
    checkpoint = store.latest()
    for warning in store.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if checkpoint is None:
        raise ArgumentError(
            complain("--resume", "find a checkpoint", f"none in '{folder}'", "Check --out, or train without --resume.")
        )
    return checkpoint


def _refuse_used(folder: Path) -> None:
    """A new run never overwrites an old one."""
    if (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir()):
        raise ArgumentError(
            complain("--out", "name a folder without checkpoints", f"'{folder}'", "Add --resume to continue that run.")
        )
