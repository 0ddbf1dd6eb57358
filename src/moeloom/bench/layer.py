"""``moeloom bench layer``: at every point, every contender is checked, then timed in turns with the others."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from moeloom.bench import measure, records, timing
from moeloom.bench.ceiling import Ceiling, measure_ceiling, warm
from moeloom.bench.floor import Floor, Work, floor
from moeloom.bench.inputs import DTYPES, PATIENCE_SECONDS, Point, Problem, build
from moeloom.bench.models import ModelShape
from moeloom.bench.oracle import Error, Oracle, build_oracle, compare
from moeloom.bench.rivals.base import Contender, Place, Rival, RivalOptions
from moeloom.bench.routing import REPLAY
from moeloom.runtime.ep_group import EPGroup, resolve_group

#: Rounds of one point: enough for a median, however slow; no more than steady numbers need, however quick.
LEAST_ROUNDS, MOST_ROUNDS = 5, 500
#: Samples of host time, likewise, and the share of a point's seconds that they may take.
LEAST_SAMPLES, MOST_SAMPLES, SAMPLING_SHARE = 5, 100, 0.1
#: Length of the text of a failure in a record.
REASON_LENGTH = 300


@dataclass(frozen=True)
class LayerOptions:
    """The matrix, and how long to measure.

    Attributes:
        shapes, tokens, routings, shared, passes: the matrix, innermost last.
        rivals: what is measured at every point, in turns.
        dtype: of operands; weight gradients are stored in it.
        ep_slice: as in :class:`~moeloom.bench.inputs.Point`.
        l2: ``("cold",)``, ``("warm",)`` or both: the cache is emptied before every timed call, or left as it is.
        seconds: of timing for a point and pass, over all contenders.
        warmup_s: of dense products before anything is measured.
        point_warmup_s: of untimed rounds before a point is timed.
        seed: of all random numbers.
        rival_options: options of rivals.
        count_launches: trace one call of each contender.
        commit: what to record as commit; None: that of the source tree.
    """

    shapes: Sequence[ModelShape]
    tokens: Sequence[int]
    routings: Sequence[str]
    shared: Sequence[bool]
    passes: Sequence[str]
    rivals: Sequence[Rival]
    dtype: str = "bf16"
    ep_slice: int = 8
    l2: Sequence[str] = ("cold",)
    seconds: float = 2.0
    warmup_s: float = 2.0
    point_warmup_s: float = 0.4
    seed: int = 0
    rival_options: RivalOptions = field(default_factory=RivalOptions)
    count_launches: bool = True
    commit: str | None = None

    def points(self) -> list[Point]:
        """All points, in the order in which they are measured."""
        places = itertools.product(self.shapes, self.tokens, self.routings, self.shared)
        common = dict(dtype=self.dtype, ep_slice=self.ep_slice, seed=self.seed)
        return [Point(shape, tokens, routing, shared, **common) for shape, tokens, routing, shared in places]


@dataclass
class _Running:
    """A contender that passed its check, and what is known about it."""

    rival: Rival
    contender: Contender
    errors: dict[str, Error]


class LayerBenchmark:
    """Measures a matrix on one rank; all ranks of a group do the same calls.

    Args:
        options: what to measure.
        device: of this rank.
        process_group: the EP group, or None.
        report: called with what is being done, in words, whenever that changes.
    """

    def __init__(
        self,
        options: LayerOptions,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.options, self.device = options, device
        self._process_group, self._report = process_group, report
        self._group: EPGroup = resolve_group(process_group)
        self._dtype = DTYPES[options.dtype]
        self.ceiling: Ceiling | None = None
        self._machine: dict[str, object] = {}

    def prepare(self) -> None:
        """Reject points that cannot be, warm up, and measure the two rates of the machine."""
        for point in self.options.points():
            point.check(self._group.size)
        self._machine = records.machine(self.device, self.options.commit)
        self._report("warming up")
        warm(self.device, self._dtype, self.options.warmup_s)
        self._report("measuring dense products and copies")
        mine = measure_ceiling(self.device, self._dtype, min(2.0, self.options.warmup_s))
        # Over ranks, the slowest one's rates: it is the one that all wait for.
        rates = self._gather([mine.gemm_tflops, mine.copy_gb_per_s])
        self.ceiling = Ceiling(min(r[0] for r in rates), mine.gemm_by_size, min(r[1] for r in rates))

    def run(self) -> Iterator[dict[str, object]]:
        """Yield records as they are measured; :meth:`prepare` comes first."""
        for point in self.options.points():
            yield from self.run_point(point)
            self._free()

    def run_point(self, point: Point) -> Iterator[dict[str, object]]:
        """Measure all contenders and passes at one point."""
        label = f"{point.shape.name}, T={point.tokens}, {point.routing}" + (", shared" if point.shared else "")
        self._report(f"{label}: inputs")
        problem = build(point, self.device, self._process_group)
        run = records.new_run()
        running: list[_Running] = []
        self._report(f"{label}: fp64 results")
        oracle = build_oracle(problem, backward=any(p != "fwd" for p in self.options.passes))
        for rival in self.options.rivals:
            self._report(f"{label}: checking {rival.name}")
            found, reason = self._check(rival, problem, oracle)
            if found is None:
                for pass_ in self.options.passes:
                    yield self._failure(problem, rival, pass_, run, reason)
            else:
                running.append(found)
        del oracle
        self._free()
        for pass_ in self.options.passes:
            self._report(f"{label}: timing {pass_}")
            yield from self._run_pass(problem, pass_, running, run)

    def _check(self, rival: Rival, problem: Problem, oracle: Oracle) -> tuple[_Running | None, str]:
        """Make a contender and compare its results; return it, or the reason why it is not timed."""
        reason = rival.missing(Place(self.device, self._dtype, self._group.size))
        if reason is not None:
            return None, f"missing: {reason}"
        contender, errors, reason = None, {}, ""
        try:
            contender = rival.prepare(problem, self.options.rival_options)
            if contender.is_layer:
                errors = compare(contender.results(backward="d_x" in oracle.want), oracle.want)
                reason = wrong(errors, oracle)
        except Exception as error:  # Whatever a rival raises is its result, and the others go on.
            reason = describe(error)
        if reason := self._first_reason(reason):
            del contender
            self._free()
            return None, f"failed: {reason}"
        return _Running(rival, contender, errors), ""

    def _run_pass(self, problem: Problem, pass_: str, running: list[_Running], run: str) -> Iterator[dict[str, object]]:
        """Time one pass of all contenders that still run."""
        steps = {one.rival.name: one.contender.step(one.rival.name, pass_) for one in running}
        costs: dict[str, dict[str, object]] = {}
        for one in list(running):
            reason = ""
            try:
                costs[one.rival.name] = self._costs(one, steps[one.rival.name])
            except Exception as error:
                reason = describe(error)
            if reason := self._first_reason(reason):
                running.remove(one)
                del steps[one.rival.name]
                self._free()
                passes = self.options.passes
                for lost in passes[passes.index(pass_) :]:
                    yield self._failure(problem, one.rival, lost, run, f"failed: {reason}")
        if not running:
            return
        for l2 in self.options.l2:
            times, reason = {}, ""
            try:
                times = self._times(list(steps.values()), cold=l2 == "cold")
            except Exception as error:
                reason = describe(error)
            if reason := self._first_reason(reason):
                # Nobody can say whose fault it was: they ran in turns and the device reports late.
                for one in running:
                    yield self._failure(problem, one.rival, pass_, run, f"failed: while timing all: {reason}")
                return
            for one in running:
                yield self._record(problem, one, pass_, run, l2, times[one.rival.name], costs[one.rival.name])

    def _times(self, steps: list[timing.Step], *, cold: bool) -> dict[str, list[float]]:
        """Warm up, agree on a number of rounds, time them, and take the slowest rank of every iteration."""
        rounds = self._rounds(steps, 1, self.options.point_warmup_s, (1, MOST_ROUNDS))
        rounds = self._rounds(steps, rounds, self.options.seconds, (LEAST_ROUNDS, MOST_ROUNDS))
        mine = timing.interleave(steps, rounds, self.device, cold=cold)
        by_rank = {name: self._gather(times) for name, times in mine.items()}
        return {name: timing.slowest(lists) for name, lists in by_rank.items()}

    def _rounds(self, steps: list[timing.Step], trial: int, seconds: float, between: tuple[int, int]) -> int:
        """Run some untimed rounds; return how many would take ``seconds``. All ranks get the same number."""
        mine = timing.round_seconds(steps, self.device, trial)
        slowest = max(once for [once] in self._gather([mine]))
        return min(between[1], max(between[0], round(seconds / slowest)))

    def _costs(self, one: _Running, step: timing.Step) -> dict[str, object]:
        """Measure host time, memory and launches of one contender that is a layer."""
        if not one.contender.is_layer:
            return {}
        peak = measure.peak_bytes(step, self.device, one.contender.gradient_bytes)
        samples = self._rounds([step], 1, SAMPLING_SHARE * self.options.seconds, (LEAST_SAMPLES, MOST_SAMPLES))
        host = measure.host_time(step, self.device, samples)
        launched = measure.launches(step, self.device) if self.options.count_launches else None
        found: dict[str, object] = {"peak_bytes": peak, "launches": launched}
        if host is not None:
            found |= {"host_us": host.p50, "host_us_p99": host.p99, "host_samples": host.samples}
        return found

    def floor_of(self, problem: Problem, pass_: str) -> Floor:
        """Return the floor of this rank's work."""
        point = problem.point
        work = Work(
            shape=point.shape,
            pass_=pass_,
            tokens=point.tokens,
            rows_per_expert=problem.rows_per_expert,
            shared=point.shared,
            bytes_per_element=problem.x.element_size(),
            bytes_per_gradient=problem.x.element_size(),
        )
        return floor(work, gemm_tflops=self.ceiling.gemm_tflops, copy_gb_per_s=self.ceiling.copy_gb_per_s)

    def _base(self, problem: Problem, rival: Rival, pass_: str, run: str) -> dict[str, object]:
        """Return the fields that say what was measured."""
        point = problem.point
        is_replay = point.routing.startswith(REPLAY)
        routing = REPLAY + Path(point.routing.removeprefix(REPLAY)).name if is_replay else point.routing
        return self._machine | {
            "model": point.shape.name,
            "ep_size": self._group.size,
            "virtual": False,
            "ep_slice": point.ep_slice,
            "tokens": point.tokens,
            "routing": routing,
            "shared": point.shared,
            "dtype": point.dtype,
            "wgrad_dtype": point.dtype,
            "pass": pass_,
            "backend": rival.backend,
            "run": run,
            "runs": 0,
            "kind": "layer",
            "is_layer": True,
            "seed": point.seed,
            "gemm_ceiling_tflops": self.ceiling.gemm_tflops,
            "gemm_sizes": self.ceiling.gemm_by_size,
            "copy_gb_per_s": self.ceiling.copy_gb_per_s,
            "warmup_s": self.options.warmup_s,
        }

    def _failure(self, problem: Problem, rival: Rival, pass_: str, run: str, reason: str) -> dict[str, object]:
        """Return the record of a contender that was not timed."""
        return records.complete(self._base(problem, rival, pass_, run) | {"error": reason})

    def _record(
        self,
        problem: Problem,
        one: _Running,
        pass_: str,
        run: str,
        l2: str,
        times: list[float],
        costs: dict[str, object],
    ) -> dict[str, object]:
        """Return the record of a timed contender; over ranks, the floor of the busiest one."""
        fields = timing.summary(times)
        ms, point = fields["ms_median"], problem.point
        mine = self.floor_of(problem, pass_)
        ranks = self._gather([mine.ms, int((problem.ids >= 0).sum()), mine.terms()])
        floor_ms, _, terms = max(ranks, key=lambda facts: facts[0])
        # Per rank: all ranks share the work of all tokens.
        mean_routes = round(sum(facts[1] for facts in ranks) / len(ranks))
        useful = point.shape.useful_flops(point.tokens, mean_routes, pass_, point.shared)
        shown = {name: error for name, error in one.errors.items() if pass_ != "fwd" or name == "out"}
        worst = max((timing.significant(error.relative_l2) for error in shown.values()), default=None)
        bound = None
        if "host_us" in costs:
            bound = measure.host_bound_tokens(costs["host_us"], ms, point.tokens, terms["weights_ms"])
        return records.complete(
            self._base(problem, one.rival, pass_, run)
            | fields
            | costs
            | {
                "useful_tflops": timing.significant(useful / ms / 1e9),
                "floor_ms": timing.significant(floor_ms),
                "floor_terms": {name: timing.significant(value) for name, value in terms.items()},
                "floor_share": timing.significant(floor_ms / ms, 4),
                "rel_l2_error": worst,
                "errors": {name: error.rounded() for name, error in shown.items()} or None,
                "host_bound_tokens": bound,
                "l2": l2,
                "is_layer": one.contender.is_layer,
                "note": one.contender.note,
                "sm_clock_mhz": records.sm_clock_mhz(self.device),
            }
        )

    def _gather(self, facts: list) -> list[list]:
        """Return what every rank states, in rank order."""
        if self._group.size == 1:
            return [facts]
        return self._group.gather_json(facts, seconds=PATIENCE_SECONDS, phase="benchmark")

    def _first_reason(self, reason: str) -> str:
        """Return the first rank's reason to stop, or nothing: all ranks must go on with the same contenders."""
        if self._group.size == 1:
            return reason
        told = self._group.gather_json(reason, seconds=PATIENCE_SECONDS, phase="benchmark")
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")

    def _free(self) -> None:
        """Give back memory that belongs to nobody, so that one contender's leftovers are not another's shortage."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def wrong(errors: dict[str, Error], oracle: Oracle) -> str:
    """Return what is wrong with results, or nothing if every one is there and within its limit."""
    absent = [name for name in oracle.want if name not in errors]
    if absent:
        return f"wrong result: no {', '.join(absent)}"
    for name, error in errors.items():
        # NaN is within no limit.
        if not error.relative_l2 <= oracle.limits[name]:
            return (
                f"wrong result: {name} is off by {error.relative_l2:.2e} (relative L2 against fp64), more than "
                f"{oracle.limits[name]:.2e}"
            )
    return ""


def describe(error: BaseException) -> str:
    """Return an exception as one line of a record."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:REASON_LENGTH]
