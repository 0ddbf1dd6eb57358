"""The hopper forward on one GPU: is it right, does it repeat its bits, and where does the time go?

    PYTHONPATH=src python benchmarks/hopper_forward.py --out results.jsonl --seconds 230

Compiles all variants in parallel first, then checks, then times them on the EP8 slices of the four models; prints a
short table last and appends one JSON object for each result to the file. Each part stands alone: what fails is
reported, and the rest goes on.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from moeloom import MoEConfig, moe
from moeloom.backends.hopper.forward_pass import TUNING, wave_rows
from moeloom.bench.models import MODELS
from moeloom.config import ROW_BLOCK
from moeloom.runtime.forward import Operands, forward_launch, schedule_launches
from moeloom.runtime.tuning import ALL, Parts, Tuning
from moeloom.runtime.workspace import POOL, Shape
from moeloom.schedule import build_schedule
from tests.hopper import Layout, Prepared, Sizes, answer, make_inputs

#: Variants of the kernel that have to be compiled, by name: how it is cut, and what is left out.
VARIANTS = {
    "base": (TUNING, ALL),
    "3 stages 5 slots": (replace(TUNING, stages=3, slots=5), ALL),
    "depth 32, 7 x, 3 slots": (replace(TUNING, depth=32, stages=7, slots=3), ALL),
    "depth 32, 6 x, 5 slots": (replace(TUNING, depth=32, stages=6, slots=5), ALL),
    "copy 2048": (replace(TUNING, copy=2048), ALL),
    "piece 16": (replace(TUNING, piece=16), ALL),
    "piece 8": (replace(TUNING, piece=8), ALL),
    "no dispatch": (TUNING, Parts(dispatch=False)),
    "no push": (TUNING, Parts(push=False)),
    "no sums": (TUNING, Parts(sums=False)),
    "GEMMs only": (TUNING, Parts(dispatch=False, push=False, sums=False)),
}
SHORT = ("base", "3 stages 5 slots", "depth 32, 6 x, 5 slots", "no dispatch", "no push", "no sums", "GEMMs only")
#: Row blocks of a minibatch and of the ring, beside the default of one wave and two minibatches.
LAYOUTS = ((4, 8), (8, 16), (8, 24), (12, 24), (16, 32), (32, 64))


class Report:
    """Lines for the table at the end, and the file of results."""

    def __init__(self, path: str, seconds: float) -> None:
        self.lines: list[str] = []
        self.path, self.end, self.began = path, time.monotonic() + seconds, time.monotonic()

    def say(self, text: str) -> None:
        self.lines.append(text)
        print(f"[{time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def record(self, **fields: object) -> None:
        with open(self.path, "a", encoding="utf-8") as out:
            out.write(json.dumps(fields) + "\n")

    def part(self, name: str, function, *args) -> object:
        """Run a part; what it raises is reported, not raised."""
        if time.monotonic() > self.end:
            self.say(f"{name}: left out, no time")
            return None
        try:
            return function(*args)
        except Exception as error:
            self.say(f"{name}: FAILED {type(error).__name__}: {str(error)[:300]}")
            traceback.print_exc(limit=4)
            self.record(part=name, error=str(error))
            return None


class Problem:
    """One model's layer with random routes, and its launches."""

    def __init__(self, name: str, tokens: int, experts: int | None = None, saved: bool = True) -> None:
        self.model, self.tokens = MODELS[name], tokens
        model = self.model
        experts = experts or model.experts // 8
        self.inner, hidden, device = model.inner, model.hidden, torch.device("cuda", torch.cuda.current_device())
        g = torch.Generator(device=device).manual_seed(0)
        draw = lambda *shape, fan=1: torch.randn(  # noqa: E731
            *shape, device=device, dtype=torch.bfloat16, generator=g
        ).mul_(fan**-0.5)
        self.x = draw(tokens, hidden)
        scores = torch.rand(tokens, max(experts, model.top_k), device=device, generator=g)
        self.ids = scores.topk(model.top_k, -1).indices % experts
        self.weights = torch.rand(tokens, model.top_k, device=device, generator=g)
        self.gate_up, self.down = (
            draw(experts, 2 * model.inner, hidden, fan=hidden),
            draw(experts, hidden, model.inner, fan=model.inner),
        )
        self.experts, self.device = experts, device
        self.flops = 6 * tokens * model.top_k * hidden * model.inner
        self.out = torch.empty_like(self.x)
        self.rows = torch.empty(experts, dtype=torch.int64, device=device)
        capacity = Shape(device, hidden, model.inner, experts, 1, model.top_k, 256).capacity_blocks(tokens)
        self.kept = self.x.new_empty(capacity * ROW_BLOCK, 2 * model.inner) if saved else None

    def launches(self, tuning: Tuning = TUNING, parts: Parts = ALL, blocks=None, sms=None, saved=True) -> list:
        """Schedule and layer; ``blocks`` are those of a minibatch and of the ring."""
        sms = sms or torch.cuda.get_device_properties(self.device).multi_processor_count
        minibatch = wave_rows(self.inner, 132) // ROW_BLOCK if blocks is None else blocks[0]
        ring = 2 * minibatch if blocks is None else blocks[1]
        shape = Shape(self.device, self.x.shape[1], self.inner, self.experts, 1, self.ids.shape[1], ring * ROW_BLOCK)
        workspace = POOL.take(shape, self.tokens)
        operands = Operands(
            x=self.x,
            topk_ids=self.ids,
            all_ids=self.ids,
            topk_weights=self.weights,
            gate_up_proj=self.gate_up,
            down_proj=self.down,
            out=self.out,
            rows_per_expert=self.rows,
            gate_up=self.kept if saved else None,
            limit=self.model.swiglu_limit,
        )
        layer = forward_launch(
            operands,
            workspace,
            minibatch_rows=minibatch * ROW_BLOCK,
            num_sms=sms,
            deadline_s=5.0,
            tuning=tuning,
            parts=parts,
        )
        self.workspace = workspace
        return [*schedule_launches(operands, workspace), layer]

    def moe(self, backend: str) -> torch.Tensor:
        return moe(
            self.x,
            self.ids,
            self.weights,
            self.gate_up,
            self.down,
            swiglu_limit=self.model.swiglu_limit,
            config=MoEConfig(backend=backend),
        )


def run(launches: list) -> None:
    for launch in launches:
        launch.run()


def median_ms(function, seconds: float = 0.12, least: int = 5, most: int = 40) -> float:
    """Median time of a call on the device."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    torch.cuda.synchronize()
    count = max(least, min(most, int(seconds / (time.perf_counter() - started))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for begin, end in events:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


# ------------------------------------------------------------------------------------------------------------ compiling


def compile_jobs() -> list[tuple[str, str]]:
    names = list(MODELS)
    return [(name, v) for v in VARIANTS for name in names if v in SHORT or name in (names[0], names[2])]


def warm_up(job: tuple[str, str]) -> tuple[tuple[str, str], float, str]:
    """In a process of its own: compile one variant into the cache on disk."""
    began = time.monotonic()
    try:
        torch.set_num_threads(1)
        tuning, parts = VARIANTS[job[1]]
        for launch in Problem(job[0], 16, experts=2).launches(tuning, parts):
            launch.kernel.warmup(
                **launch.args, grid=(1,), num_warps=launch.num_warps, enable_fp_fusion=False, **launch.options
            )
        return job, time.monotonic() - began, ""
    except Exception as error:
        return job, time.monotonic() - began, f"{type(error).__name__}: {str(error)[:200]}"


def compile_all(report: Report) -> None:
    jobs = compile_jobs()
    count = min(len(jobs), max(1, (os.cpu_count() or 2) - 2))
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        results = pool.map_async(warm_up, jobs, chunksize=1).get(timeout=150)
    failed = [f"{job}: {error}" for job, _, error in results if error]
    slowest = max(seconds for _, seconds, _ in results)
    report.say(f"compiled {len(jobs)} variants in {time.monotonic() - began:.0f} s, slowest {slowest:.1f} s")
    for text in failed[:4]:
        report.say(f"  not compiled: {text}")


# ------------------------------------------------------------------------------------------------------------- checking


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    error, size = (got.double() - want.double()).norm(), want.double().norm()
    return float(error / size) if size > 0 else float(error)


def check_small(report: Report) -> None:
    cases = [
        Sizes(tokens=1, top_k=1),
        Sizes(tokens=20),
        Sizes(tokens=300, hidden=320, inner=192, experts=6, top_k=3, limit=1.0, nan_neighbours=True),
        Sizes(tokens=200, hidden=576, inner=1088, experts=16, top_k=4, routing="zipf"),
        Sizes(tokens=700, hidden=256, inner=64, experts=300, top_k=8, nan_neighbours=True),
        Sizes(tokens=400, hidden=256, inner=256, experts=8, top_k=16, routing="duplicates"),
        Sizes(tokens=64, routing="none"),
    ]
    for sizes in cases:
        given = make_inputs(sizes)
        want = answer(given, sizes.limit)
        call = Prepared(given.to("cuda"), sizes, Layout(num_sms=132, deadline_s=5.0, saved_rows=256))
        got = call.run()["out"].cpu()
        error = relative(got, want)
        verdict = "ok" if error < 4e-3 else f"WRONG, alarm {int(call.workspace.alarm[0])}"
        report.say(f"small {sizes.tokens}x{sizes.hidden}x{sizes.inner} E{sizes.experts}: error {error:.1e} {verdict}")
        report.record(part="small", sizes=str(sizes), error=error)


def check_model(report: Report, problem: Problem) -> None:
    """Schedule against its specification, output against the torch backend, saved rows against a product."""
    launches = problem.launches()
    problem.out.fill_(float("nan"))
    run(launches)
    torch.cuda.synchronize()
    want = build_schedule(problem.ids[None], num_experts=problem.experts, rank=0)
    w = problem.workspace
    same = all(
        torch.equal(a[: len(b)].long(), b.long())
        for a, b in (
            (w.row_rank, want.source_rank),
            (w.row_slot, want.source_slot),
            (w.block_expert, want.block_expert),
            (w.block_rows, want.block_rows),
            (problem.rows, want.rows_per_expert),
        )
    )
    reference = problem.moe("torch")
    error = relative(problem.out, reference)
    rows = want.source_slot[:128]
    exact = problem.x[(rows.clamp(min=0) // problem.ids.shape[1])].float() @ problem.gate_up[0].float().t()
    kept = relative(problem.kept[:128][rows >= 0], exact[rows >= 0])
    alarm = int(w.alarm[0])
    report.say(
        f"{problem.model.name} T={problem.tokens}: schedule {'equal' if same else 'DIFFERENT'}, against torch "
        f"{error:.1e}, saved rows {kept:.1e}, alarm {alarm} {w.trouble.tolist() if alarm else ''}"
    )
    report.record(part="model", model=problem.model.name, tokens=problem.tokens, schedule=same, error=error, kept=kept)


def check_bits(report: Report, problem: Problem, repeats: int) -> None:
    """The same bits: repeats beside another stream, layouts, tunings, numbers of CTAs."""
    run(problem.launches())
    want, kept = problem.out.clone(), problem.kept.clone()
    live = kept.isfinite()
    side, other = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    launches, wrong = problem.launches(), 0
    for _ in range(repeats):
        with torch.cuda.stream(side):
            torch.mm(other, other)
        problem.out.fill_(float("nan"))
        run(launches)
        wrong += not torch.equal(problem.out, want)
    found = [f"{repeats} repeats beside a stream: {wrong} differ"]
    for name, keywords in (
        ("1 SM", dict(sms=1)) if problem.tokens < 1000 else ("131 SMs", dict(sms=131)),
        ("7 SMs", dict(sms=7)),
        ("78 SMs", dict(sms=78)),
        ("114 SMs", dict(sms=114)),
        ("minibatch 8, ring 24", dict(blocks=(8, 24))),
        ("minibatch 3, ring 7", dict(blocks=(3, 7))),
        *((v, dict(tuning=VARIANTS[v][0])) for v in list(VARIANTS)[1:5]),
    ):
        problem.out.fill_(float("nan"))
        run(problem.launches(**keywords))
        same = torch.equal(problem.out, want) and torch.equal(problem.kept[live], kept[live])
        if not same:
            found.append(f"{name} DIFFERS")
    report.say(f"bits, {problem.model.name} T={problem.tokens}: {'; '.join(found)}")
    report.record(part="bits", model=problem.model.name, tokens=problem.tokens, found=found)


def check_graph(report: Report, problem: Problem) -> None:
    """Capture, replay with other routes and weights, compare with a plain call."""
    launches = problem.launches()
    run(launches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(launches)
    same = []
    for turn in range(3):
        problem.ids.copy_(torch.rand(problem.tokens, problem.experts, device="cuda").topk(problem.ids.shape[1]).indices)
        if turn == 1:
            problem.ids[::3] = -1
        problem.out.fill_(float("nan"))
        graph.replay()
        got = problem.out.clone()
        problem.out.fill_(float("nan"))
        run(launches)
        same.append(torch.equal(got, problem.out))
    ms = median_ms(graph.replay)
    report.say(f"graph, {problem.model.name} T={problem.tokens}: replays equal {same}, {ms:.3f} ms a replay")
    report.record(part="graph", same=same, ms=ms)


def check_host(report: Report, problem: Problem) -> None:
    """Time that the host needs for a call, with the device idle."""
    launches = problem.launches()
    run(launches)

    def host_us(function) -> float:
        times = []
        for _ in range(15):
            torch.cuda.synchronize()
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e6

    problem.moe("hopper")
    found = {
        "three launches": host_us(lambda: run(launches)),
        "the layer's launch": host_us(launches[-1].run),
        "arguments": host_us(problem.launches),
        "moe(), hopper": host_us(lambda: problem.moe("hopper")),
        "moe(), torch": host_us(lambda: problem.moe("torch")),
    }
    report.say("host us: " + ", ".join(f"{name} {us:.0f}" for name, us in found.items()))
    report.record(part="host", **found)


# --------------------------------------------------------------------------------------------------------------- timing


def time_model(report: Report, name: str, tokens: int) -> None:
    problem = Problem(name, tokens)
    report.part("check", check_model, report, problem)
    rows = int(((problem.rows + 127) // 128).sum()) * 128
    cells: list[str] = []

    def measure(label: str, launches: list) -> None:
        ms = median_ms(lambda: run(launches))
        tflops = problem.flops / ms / 1e9
        cells.append(f"{label} {ms:.3f} ms {tflops:.0f}")
        report.record(
            part="time", model=name, tokens=tokens, variant=label, ms_median=ms, useful_tflops=tflops, rows=rows
        )

    base = problem.launches()
    measure("base", base)
    ms = median_ms(lambda: run(base[:2]))
    cells.append(f"schedule {ms * 1e3:.0f} us")
    report.record(part="time", model=name, tokens=tokens, variant="schedule", ms_median=ms)
    measure("nothing saved", problem.launches(saved=False))
    for blocks in LAYOUTS:
        measure(f"mb {blocks[0]} ring {blocks[1]}", problem.launches(blocks=blocks))
    for variant in [v for n, v in compile_jobs() if n == name and v != "base"]:
        if time.monotonic() < report.end:
            measure(variant, problem.launches(*VARIANTS[variant]))
    ms = median_ms(lambda: problem.moe("torch"))
    cells.append(f"torch backend {ms:.3f} ms {problem.flops / ms / 1e9:.0f}")
    report.record(part="time", model=name, tokens=tokens, variant="moeloom-torch", ms_median=ms)
    report.say(f"{name} T={tokens} ({rows} rows of {tokens * problem.ids.shape[1]}): " + " | ".join(cells))


def rates(report: Report) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(40):
        torch.mm(a, a)
    ms = median_ms(lambda: torch.mm(a, a), 0.5)
    big = torch.empty(1 << 30, device="cuda", dtype=torch.bfloat16)
    copy = median_ms(lambda: big[: 1 << 29].copy_(big[1 << 29 :]))
    report.say(f"dense 8192^3 {2 * 8192**3 / ms / 1e9:.0f} TFLOP/s; copy {2 * (1 << 30) / copy / 1e6:.0f} GB/s")
    report.record(part="rates", gemm_tflops=2 * 8192**3 / ms / 1e9, copy_gb_per_s=2 * (1 << 30) / copy / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="file of JSON lines to append to")
    parser.add_argument("--seconds", type=float, default=230.0, help="after so many seconds no part is begun")
    options = parser.parse_args()
    import triton

    # A kernel that hangs must not keep the machine.
    faulthandler.dump_traceback_later(options.seconds + 40, exit=True)
    report = Report(options.out, options.seconds)
    report.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    report.record(part="machine", device=torch.cuda.get_device_name(), torch=torch.__version__)
    report.part("compile", compile_all, report)
    report.part("small", check_small, report)
    report.part("rates", rates, report)
    names = list(MODELS)
    for name in (names[0], names[2], names[1], names[3]):
        report.part(f"{name} T=8192", time_model, report, name, 8192)
        torch.cuda.empty_cache()
        report.part(f"{name} T=2048", time_model, report, name, 2048)
        POOL.clear()
        torch.cuda.empty_cache()
        if name == names[0]:
            problem = report.part("problem", Problem, name, 2048)
            if problem is not None:
                report.part("bits", check_bits, report, problem, 20)
                report.part("graph", check_graph, report, problem)
                report.part("host", check_host, report, problem)
            tiny = report.part("problem", Problem, name, 32, 4)
            if tiny is not None:
                report.part("bits", check_bits, report, tiny, 300)
            del problem, tiny
            POOL.clear()
            torch.cuda.empty_cache()
    print("\n==== summary")
    print("\n".join(report.lines))


if __name__ == "__main__":
    main()
