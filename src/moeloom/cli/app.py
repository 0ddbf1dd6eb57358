"""The commands and their options."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from moeloom.cli.bench_app import bench

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Mixture-of-experts layers with the same bits every time, and a small language model trained on them.",
)
app.add_typer(bench, name="bench")


def _run(module: str, function: str, **arguments: object) -> None:
    """Import what a command needs, run it, and end with its exit code."""
    try:
        code = getattr(importlib.import_module(f"moeloom.cli.{module}"), function)(**arguments)
    except KeyboardInterrupt:
        print("interrupted; nothing to save", file=sys.stderr)
        code = 130
    raise typer.Exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        from moeloom.version import __version__

        print(f"moeloom {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def train(
    preset: Annotated[
        str,
        typer.Option(
            help="tiny (two CPU cores, under 3 minutes), small (a GPU), smoke (seconds); default tiny, on a GPU small."
        ),
    ] = "",
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Train for this long instead of a number of steps.")] = None,
    ep: Annotated[int | None, typer.Option(help="Spread the experts over this many processes, started here.")] = None,
    data: Annotated[
        str | None, typer.Option(help="File or folder of text; default: the standard library's sources.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder for results; default: the next free runs/NNN.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest checkpoint of --out (default: of the last run).")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and batches.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="auto (bf16 on a GPU), fp32, bf16.")] = None,
    backend: Annotated[str | None, typer.Option(help="Backend of the MoE layers: auto, reference.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of a step, over all ranks and micro-batches.")] = None,
    seq: Annotated[int | None, typer.Option(help="Bytes of a sequence.")] = None,
    grad_accum: Annotated[int | None, typer.Option(help="Micro-batches that a step is cut into.")] = None,
    config: Annotated[str | None, typer.Option(help="JSON file with any of these options and model sizes.")] = None,
) -> None:
    """Train a small MoE language model on real text."""
    overrides = dict(
        steps=steps,
        minutes=minutes,
        data=data,
        seed=seed,
        dtype=dtype,
        backend=backend,
        lr=lr,
        batch=batch,
        seq=seq,
        grad_accum=grad_accum,
    )
    _run(
        "train", "run", preset=preset, overrides=overrides, config=config, ep=ep, out=out, resume=resume, device=device
    )


@app.command()
def generate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, or the --out of a training.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    length: Annotated[int, typer.Option(min=1, help="Bytes to add.")] = 400,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest byte.")] = 0.7,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Continue a prompt with a trained model."""
    _run(
        "use",
        "run_generate",
        checkpoint=checkpoint,
        prompt=prompt,
        length=length,
        temperature=temperature,
        seed=seed,
        device=device,
    )


@app.command("eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, or the --out of a training.")],
    data: Annotated[
        str | None, typer.Option(help="File or folder of text; default: the standard library's sources.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Measure a trained model on the validation part of a text, beside simpler methods."""
    _run("use", "run_eval", checkpoint=checkpoint, data=data, device=device)


@app.command()
def doctor() -> None:
    """Say what this machine has and which backend would run."""
    _run("doctor", "run")


@app.command("compile")
def compile_kernels(
    kernel: Annotated[
        list[str] | None, typer.Option(help="A kernel of this package, or path/to/file.py:LIST; default: all of ours.")
    ] = None,
    arch: Annotated[str, typer.Option(help="Architectures, separated by commas.")] = "90a,100a,103a",
    triton: Annotated[
        str, typer.Option(help="Versions, separated by commas: installed, newest, 3.6.0, or a folder that holds one.")
    ] = "installed",
    json: Annotated[str | None, typer.Option(help="Write all results to this file, too.")] = None,
    keep: Annotated[str | None, typer.Option(help="Keep PTX, SASS and cubins in this folder.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes at a time; default: one for each core.")] = None,
) -> None:
    """Build GPU kernels without a GPU; check spills, tensor cores, and the order of stores and releases."""
    _run(
        "compile",
        "run",
        kernels=kernel or [],
        architectures=arch,
        triton=triton,
        json_path=json,
        keep=keep,
        jobs=jobs,
    )
