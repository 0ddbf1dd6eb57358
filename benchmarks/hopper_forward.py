"""The hopper forward on one GPU: is it right, does it repeat its bits, and where does the time go?

    PYTHONPATH=src python benchmarks/hopper_forward.py --out results.jsonl --seconds 120

Compiles all variants in parallel first, then checks, then times them on the EP8 slices of the four models; prints a
short table last and appends one JSON object for each result to the file. Each part stands alone: what fails is
reported, and the rest goes on. It ends at most 28 seconds after ``--seconds``. What is compared is measured in turns,
because a device that grows warm grows slow.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
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

from moeloom import MoEConfig, SharedExperts, moe
from moeloom.backends.hopper.forward_pass import TUNING, wave_rows
from moeloom.bench.models import MODELS
from moeloom.config import ROW_BLOCK
from moeloom.runtime.forward import Operands, forward_launch, schedule_launches
from moeloom.runtime.plan import CallKind, ForwardPlan
from moeloom.runtime.tuning import ALL, Parts, Tuning
from moeloom.runtime.workspace import POOL, Shape
from moeloom.schedule import build_schedule
from tests.cases import Case
from tests.cases import run as run_case
from tests.hopper import Layout, Prepared, Sizes, answer, make_inputs
from tests.oracle import dense

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
        if model.shared:
            gate = draw(hidden, fan=hidden) if model.shared_gate else None
            self.shared = SharedExperts(
                draw(2 * model.shared, hidden, fan=hidden), draw(hidden, model.shared, fan=model.shared), gate
            )
        else:
            self.shared = None
        self.shared_flops = 6 * tokens * hidden * model.shared
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
        self.operands = operands
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

    def plan(self) -> ForwardPlan:
        """The default launches, bound as the backend does it."""
        self.launches()
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        saved = 0 if self.kept is None else self.kept.shape[0]
        limit, rows = self.model.swiglu_limit, wave_rows(self.inner, sms)
        return ForwardPlan(
            CallKind(self.tokens, rows, sms, 5.0, TUNING, saved, limit, False), self.operands, self.workspace
        )

    def moe(self, backend: str, shared: bool = False) -> torch.Tensor:
        return moe(
            self.x,
            self.ids,
            self.weights,
            self.gate_up,
            self.down,
            shared=self.shared if shared else None,
            swiglu_limit=self.model.swiglu_limit,
            config=MoEConfig(backend=backend),
        )

    def leaves(self, shared: bool) -> list[torch.Tensor]:
        """Tensors that get a gradient."""
        more = [self.shared.gate_up_proj, self.shared.down_proj, self.shared.gate] if shared else []
        return [t for t in (self.x, self.weights, self.gate_up, self.down, *more) if t is not None]

    def step(self, backend: str, shared: bool = False) -> list[torch.Tensor]:
        """Forward and backward; returns the output and all gradients."""
        leaves = self.leaves(shared)
        for leaf in leaves:
            leaf.requires_grad_()
        try:
            out = self.moe(backend, shared)
            return [out.detach(), *torch.autograd.grad(out, leaves, self.x.detach())]
        finally:
            for leaf in leaves:
                leaf.requires_grad_(False)


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


def in_turns_ms(functions: dict, seconds: float = 0.12, rounds: int = 3) -> dict[str, float]:
    """Median times of calls on the device; every function has its turn in every round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for turn in range(rounds):
        order = list(functions) if turn % 2 == 0 else list(functions)[::-1]
        for name in order:
            torch.cuda.synchronize()
            began = time.perf_counter()
            functions[name]()
            torch.cuda.synchronize()
            count = max(2, min(15, int(seconds / rounds / (time.perf_counter() - began))))
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            for begin, end in events:
                begin.record()
                functions[name]()
                end.record()
            torch.cuda.synchronize()
            times[name] += [begin.elapsed_time(end) for begin, end in events]
    return {name: statistics.median(found) for name, found in times.items()}


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
        results = pool.map_async(warm_up, jobs, chunksize=1).get(timeout=max(30.0, report.end - time.monotonic()))
    failed = [f"{job}: {error}" for job, _, error in results if error]
    slowest = max(seconds for _, seconds, _ in results)
    report.say(f"compiled {len(jobs)} variants in {time.monotonic() - began:.0f} s, slowest {slowest:.1f} s")
    for text in failed[:4]:
        report.say(f"  not compiled: {text}")


# ------------------------------------------------------------------------------------------------------------- checking


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    error = size = 0.0
    # In pieces: weight gradients of a model in fp64 are tens of GB.
    for a, b in zip(got.reshape(-1).split(1 << 27), want.reshape(-1).split(1 << 27), strict=True):
        error += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    return (error / size) ** 0.5 if size > 0 else error**0.5


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
        if turn == 2:
            # Fewer live tokens than were captured: what stands behind them is never read.
            problem.ids[problem.tokens // 2 :] = -1
            kept_x = problem.x.clone()
            problem.x[problem.tokens // 2 :] = float("nan")
        problem.out.fill_(float("nan"))
        graph.replay()
        got = problem.out.clone()
        problem.out.fill_(float("nan"))
        run(launches)
        same.append(torch.equal(got, problem.out))
        if turn == 2:
            same.append(not got[problem.tokens // 2 :].any())
            problem.x.copy_(kept_x)
    ms = median_ms(graph.replay)
    report.say(f"graph, {problem.model.name} T={problem.tokens}: replays equal {same}, {ms:.3f} ms a replay")
    report.record(part="graph", same=same, ms=ms)


def check_shared(report: Report) -> None:
    """Shared experts of any width, with and without gate and clamp, against fp64; all gradients, whatever is saved."""
    for shared, gate, limit in ((96, False, None), (40, True, None), (33, True, 1.0)):
        case = Case(tokens=300, hidden=256, inner=192, experts=8, top_k=3, routing="ragged", dtype=torch.bfloat16)
        inputs = replace(case, shared=shared, shared_gate=gate, limit=limit).make()
        tensors = {n: v.cuda() for n, v in vars(inputs).items() if isinstance(v, torch.Tensor)}
        want, moved = dense(inputs), replace(inputs, **tensors)
        got = [run_case(moved, config=MoEConfig(backend="hopper", saved_rows=rows)) for rows in (None, 0)]
        rival = run_case(moved, config=MoEConfig(backend="torch"))
        ours, theirs = ({n: relative(found[n].cpu(), want[n]) for n in want} for found in (got[0], rival))
        same = all(torch.equal(got[0][n], got[1][n]) for n in want)
        worst = max(want, key=lambda n: ours[n] / max(theirs[n], 1e-9))
        report.say(
            f"shared {shared}, gate {gate}, clamp {limit}: out {ours['out']:.1e} (torch {theirs['out']:.1e}), worst "
            f"against torch {worst} {ours[worst]:.1e} ({theirs[worst]:.1e}), nothing saved: "
            f"{'equal' if same else 'DIFFERS'}"
        )
        report.record(part="shared", shared=shared, gate=gate, limit=limit, ours=ours, torch=theirs, same=same)


def check_freed(report: Report, problem: Problem) -> None:
    """Inputs that are gone, and their memory taken by others, before the device has come to the call."""
    want, other = problem.moe("hopper"), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.mm(other, other)
    x, ids, weights = problem.x.clone(), problem.ids.clone(), problem.weights.clone()
    got = moe(x, ids, weights, problem.gate_up, problem.down, swiglu_limit=problem.model.swiglu_limit)
    sizes = x.numel(), ids.numel(), weights.numel()
    del x, ids, weights
    for size, dtype in zip(sizes, (torch.bfloat16, torch.int64, torch.float32), strict=True):
        torch.empty(size, device="cuda", dtype=dtype).fill_(float("nan") if dtype.is_floating_point else 7)
    same = torch.equal(got, want)
    report.say(f"inputs freed after the call: {'equal' if same else 'DIFFERS'}")
    report.record(part="freed", same=same)


def check_large(report: Report, name: str) -> None:
    """Slots beyond 2**31 elements: a call of 49,152 tokens against the same tokens in three calls."""
    problem = Problem(name, 49152, saved=False)
    got, third = problem.moe("hopper"), problem.tokens // 3
    parts = [slice(i * third, (i + 1) * third) for i in range(3)]
    limit, same = problem.model.swiglu_limit, []
    for part in parts:
        inputs = problem.x[part], problem.ids[part], problem.weights[part], problem.gate_up, problem.down
        want = moe(*inputs, swiglu_limit=limit, config=MoEConfig(backend="hopper"))
        same.append(torch.equal(got[part], want) or relative(got[part].float(), want.float()))
    elements = problem.ids.numel() * problem.x.shape[1]
    report.say(f"{name} T={problem.tokens}, slots of {elements / 2**31:.2f} * 2**31 elements: thirds equal {same}")
    report.record(part="large", model=name, tokens=problem.tokens, same=same)


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
    plan = problem.plan()
    found = {
        "three launches": host_us(lambda: plan.run(problem.operands)),
        "three launches by Triton's path": host_us(lambda: run(launches)),
        "arguments": host_us(problem.launches),
        "moe(), hopper": host_us(lambda: problem.moe("hopper")),
        "moe(), hopper, shared": host_us(lambda: problem.moe("hopper", True)),
        "moe(), torch": host_us(lambda: problem.moe("torch")),
    }
    report.say("host us: " + ", ".join(f"{name} {us:.0f}" for name, us in found.items()))
    report.record(part="host", **found)


# --------------------------------------------------------------------------------------------------------------- timing


def time_model(report: Report, name: str, tokens: int) -> None:
    problem = Problem(name, tokens)
    report.part("check", check_model, report, problem)
    rows = int(((problem.rows + 127) // 128).sum()) * 128
    base = problem.launches()
    variants = {"base": base, "nothing saved": problem.launches(saved=False)}
    variants |= {f"mb {b[0]} ring {b[1]}": problem.launches(blocks=b) for b in LAYOUTS}
    variants |= {v: problem.launches(*VARIANTS[v]) for n, v in compile_jobs() if n == name and v != "base"}
    functions = {label: functools.partial(run, launches) for label, launches in variants.items()}
    functions["schedule"] = functools.partial(run, base[:2])
    functions["moe() hopper"] = functools.partial(problem.moe, "hopper")
    functions["moe() torch"] = functools.partial(problem.moe, "torch")
    if problem.shared is not None:
        functions["moe() hopper, shared"] = functools.partial(problem.moe, "hopper", True)
        functions["moe() torch, shared"] = functools.partial(problem.moe, "torch", True)
    cells = []
    for label, ms in in_turns_ms(functions).items():
        flops = problem.flops + problem.shared_flops * label.endswith("shared")
        tflops = 0.0 if label == "schedule" else flops / ms / 1e9
        cells.append(f"{label} {ms:.3f} ms {tflops:.0f}")
        report.record(
            part="time", model=name, tokens=tokens, variant=label, ms_median=ms, useful_tflops=tflops, rows=rows
        )
    report.say(f"{name} T={tokens} ({rows} rows of {tokens * problem.ids.shape[1]}): " + " | ".join(cells))
    del functions, variants
    report.part("steps", time_steps, report, problem)


def time_steps(report: Report, problem: Problem) -> None:
    """Forward and backward: the hopper forward with the backward that it has, and the torch backend."""
    problem.kept = None
    cells = []
    for shared in (False, True):
        if shared and problem.shared is None:
            continue
        ours, theirs = problem.step("hopper", shared), problem.step("torch", shared)
        worst = max(relative(a, b) for a, b in zip(ours, theirs, strict=True))
        del ours, theirs
        steps = {b: functools.partial(problem.step, b, shared) for b in ("hopper", "torch")}
        for backend, ms in in_turns_ms(steps, 0.2).items():
            tflops = 3 * (problem.flops + problem.shared_flops * shared) / ms / 1e9
            cells.append(f"{backend}{', shared' if shared else ''} {ms:.3f} ms {tflops:.0f}")
            fields = dict(model=problem.model.name, tokens=problem.tokens, shared=shared, backend=backend)
            report.record(part="fwd+bwd", **fields, ms_median=ms, useful_tflops=tflops, error=worst)
        cells.append(f"they differ by {worst:.1e}")
    report.say(f"{problem.model.name} T={problem.tokens} forward + backward: " + " | ".join(cells))


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
    parser.add_argument("--seconds", type=float, default=120.0, help="after so many seconds no part is begun")
    options = parser.parse_args()
    import triton

    # A kernel that hangs must not keep the machine.
    faulthandler.dump_traceback_later(options.seconds + 28, exit=True)
    report = Report(options.out, options.seconds)
    report.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    report.record(part="machine", device=torch.cuda.get_device_name(), torch=torch.__version__)
    report.part("compile", compile_all, report)
    report.part("small", check_small, report)
    report.part("shared", check_shared, report)
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
                report.part("bits", check_bits, report, problem, 50)
                report.part("graph", check_graph, report, problem)
                report.part("freed", check_freed, report, problem)
                report.part("host", check_host, report, problem)
            tiny = report.part("problem", Problem, name, 32, 4)
            if tiny is not None:
                report.part("bits", check_bits, report, tiny, 1000)
            del problem, tiny
            POOL.clear()
            torch.cuda.empty_cache()
    report.part("large", check_large, report, names[0])
    print("\n==== summary")
    print("\n".join(report.lines))


if __name__ == "__main__":
    main()
