"""The options of ``moeloom bench ...``; what they do is imported when one of them runs."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure MoE layers, compare them with fp64, draw pictures of records.")

_MODEL = "kimi-k2.7-code, glm-5.2, qwen3.5-397b-a17b, deepseek-v4-pro, each also with -scaled; a list; or all."
_ROUTING = "balanced, random, zipf, hot-rank, hot-expert, replay:FILE; a list."
_AGAINST = (
    "What to measure: hopper, torch, reference, sonicmoe, transformers, liger, cublas-dense, nccl-all-to-all, deepep, "
    "hybridep; a list."
)
_SLICE = "Measure 1/N of the model's experts, as one of N ranks holds them; default 8 / ranks."
_TILES = "Tiles of SonicMoE: default pins one configuration, all lets its tuner try what it offers (minutes)."
_COMMIT = "Commit to record, for a copy of the source tree without its history."
_JSON = "File to which records are appended, one JSON object a line."


def _run(function: str, **arguments: object) -> None:
    """Import the benchmarks, run one, and end with its exit code."""
    try:
        code = getattr(importlib.import_module("moeloom.cli.bench"), function)(**arguments)
    except KeyboardInterrupt:
        print("interrupted; nothing was measured yet", file=sys.stderr)
        code = 130
    raise typer.Exit(code)


@bench.command()
def layer(
    model: Annotated[str, typer.Option(help=_MODEL)] = "kimi-k2.7-code",
    ep_slice: Annotated[int | None, typer.Option(min=1, help=_SLICE)] = None,
    tokens: Annotated[str, typer.Option(help="Tokens of a rank; a list.")] = "8192",
    routing: Annotated[str, typer.Option(help=_ROUTING)] = "random",
    pass_: Annotated[str, typer.Option("--pass", help="fwd, bwd, fwd+bwd; a list.")] = "fwd,fwd+bwd",
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    shared: Annotated[str, typer.Option(help="0 or 1: with the model's shared expert; or 0,1.")] = "0",
    against: Annotated[str, typer.Option(help=_AGAINST)] = "torch,cublas-dense",
    l2: Annotated[str, typer.Option("--l2", help="cold (emptied before each call), warm, or both.")] = "cold",
    seconds: Annotated[float, typer.Option(min=0, help="Of timing, for each point and pass.")] = 2.0,
    warmup: Annotated[float, typer.Option(min=0, help="Seconds of dense products before anything is measured.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Of all random numbers.")] = 0,
    sonicmoe_tiles: Annotated[str, typer.Option(help=_TILES)] = "default",
    json: Annotated[str | None, typer.Option("--json", help=_JSON)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    commit: Annotated[str | None, typer.Option(help=_COMMIT)] = None,
    launches: Annotated[bool, typer.Option(help="Count launches by tracing one call of each contender.")] = True,
) -> None:
    """Time a layer from ids to its output and gradients, all contenders in turns, each checked against fp64 first."""
    _run(
        "run_layer",
        model=model,
        ep_slice=ep_slice,
        tokens=tokens,
        routing=routing,
        pass_=pass_,
        dtype=dtype,
        shared=shared,
        against=against,
        l2=l2,
        seconds=seconds,
        warmup=warmup,
        seed=seed,
        sonicmoe_tiles=sonicmoe_tiles,
        json_out=json,
        device=device,
        commit=commit,
        launches=launches,
    )


@bench.command()
def errors(
    model: Annotated[str, typer.Option(help=_MODEL)] = "kimi-k2.7-code",
    ep_slice: Annotated[int | None, typer.Option(min=1, help=_SLICE)] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a rank.")] = 2048,
    routing: Annotated[str, typer.Option(help=_ROUTING)] = "random",
    dtype: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    shared: Annotated[str, typer.Option(help="0 or 1: with the model's shared expert; or 0,1.")] = "0",
    against: Annotated[str, typer.Option(help=_AGAINST)] = "torch",
    seeds: Annotated[int, typer.Option(min=1, help="Number of draws.")] = 5,
    sonicmoe_tiles: Annotated[str, typer.Option(help=_TILES)] = "default",
    json: Annotated[str | None, typer.Option("--json", help=_JSON)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    commit: Annotated[str | None, typer.Option(help=_COMMIT)] = None,
) -> None:
    """Compare every output and gradient with fp64, over several seeds."""
    _run(
        "run_errors",
        model=model,
        ep_slice=ep_slice,
        tokens=tokens,
        routing=routing,
        dtype=dtype,
        shared=shared,
        against=against,
        seeds=seeds,
        sonicmoe_tiles=sonicmoe_tiles,
        json_out=json,
        device=device,
        commit=commit,
    )


@bench.command()
def table(files: Annotated[list[str], typer.Argument(help="Files of records.")]) -> None:
    """Print records on few lines: TFLOP/s by point and backend, mean errors, failures."""
    _run("run_table", files=files)


@bench.command()
def plot(
    files: Annotated[list[str], typer.Argument(help="Files of records.")],
    out: Annotated[str, typer.Option(help="Folder for the pictures (PNG and SVG).")] = "plots",
) -> None:
    """Draw bars over models, a roofline, scaling with tokens and imbalance from records alone."""
    _run("run_plot", files=files, out=out)
