"""The emulator: launches on streams, a seeded scheduler over partitions and pending operations, and what it reports."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable

import numpy as np
import torch
from greenlet import getcurrent

from moeloom.emulator import state
from moeloom.emulator.agents import CTA, Agent, Event, Launch, Waiting, completed
from moeloom.emulator.alarms import Deadlock, Fault, Finding, Race
from moeloom.emulator.arguments import bind, convert
from moeloom.emulator.clocks import GLOBAL, SHARED, SUPPOSE, Access, Clock, Shadow
from moeloom.emulator.diagnosis import finding, reviewed, telling_first, waiting_report
from moeloom.emulator.memory import Buffer, GlobalMemory
from moeloom.emulator.rebuild import rebuild
from moeloom.emulator.sites import Sites

_STRATEGIES = ("random", "pct")
_LAGS = {"early": 0.8, "random": 0.3, "late": 0.005}
_MAX_FINDINGS = 20


def _choice(name: str, value: str | None, legal: object, rng: random.Random) -> str:
    options = list(legal)
    drawn = rng.choice(options)  # always drawn: giving one option must not change what a seed makes of the others
    if value is None:
        return drawn
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}, not {value!r}")
    return value


class Emulator:
    """Runs Gluon kernels on the CPU, from their source, under one schedule drawn from a seed.

    Launch kernels, then :meth:`run`. The same seed, options and kernels give the same run again.

    Args:
        seed: of the schedule.
        races: track accesses and report races (about half of the time of a run).
        strategy: ``"random"`` chooses uniformly, ``"pct"`` by random priorities with few changes; None: by seed.
        lag: when pending operations take effect: ``"early"``, ``"random"`` or ``"late"``; None: by seed.
        resident: CTAs that a device can hold at once; None: all.
        switch: probability that a partition is interrupted at an operation; None: by seed.
        diagnose: carry the clocks that tell what would have ordered a race (about twice the time; ``sweep`` and
            ``emulate`` repeat a run with it by themselves when they find a race).
        max_steps: scheduler steps after which a run counts as endless.

    Raises:
        ValueError: an option has no legal value.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        races: bool = True,
        strategy: str | None = None,
        lag: str | None = None,
        resident: int | None = None,
        switch: float | None = None,
        diagnose: bool = False,
        max_steps: int = 2_000_000,
    ) -> None:
        if resident is not None and resident < 1:
            raise ValueError(f"resident must be at least 1, not {resident}")
        self.seed, self.rng = seed, random.Random(seed)
        self.strategy = _choice("strategy", strategy, _STRATEGIES, self.rng)
        self.lag = _choice("lag", lag, _LAGS, self.rng)
        drawn = self.rng.choice([0.05, 0.3, 1.0])
        self.switch = drawn if switch is None else switch
        self.poison = self.rng.random() < 0.5
        self.stagger = self.rng.random() < 0.5
        self.shuffle = self.rng.random() < 0.5
        self.races_on, self.resident, self.diagnose, self.max_steps = races, resident, diagnose, max_steps
        self.num_components, self.component_names, self.component_agents = 0, [], []
        self.component_is_async = np.zeros(256, bool)
        self.findings: list[Finding] = []
        self.memory = GlobalMemory(self)
        self.locations: dict[int, object] = {}
        self.scopes_used: dict[int, dict] = {}
        self.issued: dict[tuple[int, int], int] = {}
        self.read_clocks: dict[tuple[int, int], Clock] = {}
        self.write_clocks: dict[tuple[int, int], Clock] = {}
        self.sites = Sites()
        self.launches: list[Launch] = []
        self._waiting_launches: list[Launch] = []
        self._streams: dict[tuple, list[Launch]] = {}
        self._held: dict[object, list] = {}
        self.ready: list[Agent] = []
        self.agents: list[Agent] = []
        self.events: list[Event] = []
        self.agent: Agent | None = None
        self.hub = None
        self.steps, self.time, self._jump = 0, 1_000_000, 1000

    # ---------------------------------------------------------------------------------------------------- set-up
    def register(self, name: str, tensor: torch.Tensor, *, written: bool = True) -> None:
        """Make memory known that kernels reach through pointer tables. Tensors given to a launch are known by that.

        Args:
            name: for reports.
            tensor: contiguous CPU tensor; it must live until the run ends.
            written: False: reading an element that nobody has written is an alarm.

        Raises:
            ValueError: not a contiguous CPU tensor, or it overlaps another one in part.
        """
        self.memory.register(name, tensor, written=written)

    def launch(
        self,
        kernel: object,
        grid: int | tuple[int, ...],
        args: dict | tuple | list,
        *,
        num_warps: int = 4,
        rank: int | Callable[[int], int] = 0,
        stream: object = 0,
    ) -> None:
        """Add a kernel launch.

        Args:
            kernel: a ``@gluon.jit`` function.
            grid: number of CTAs.
            args: by parameter name or in order, constexprs included: CPU tensors, tensor descriptors, numbers, tuples.
            num_warps: warps of the default partition.
            rank: whose GPU it runs on, or a function of the program id for one launch that holds several ranks (which
                share a device but count as different GPUs for scopes).
            stream: launches of one stream and device run one after another.

        Raises:
            TypeError: the arguments do not fit the kernel's parameters.
            NotEmulated: the kernel uses something the emulator does not have.
        """
        name = getattr(kernel, "__name__", str(kernel))
        fn = rebuild(kernel)
        grid = grid if isinstance(grid, int) else int(np.prod(grid))
        virtual = callable(rank)
        prefix = "" if virtual else f"r{rank}."
        values = {key: convert(self, prefix + key, x) for key, x in bind(kernel, args).items()}
        launch = Launch(name, "virtual" if virtual else rank, self._tail(rank, stream), grid)
        if self.shuffle:
            self.rng.shuffle(launch.unstarted)

        def start(pid: int) -> None:
            cta = CTA(launch, rank(pid) if virtual else rank, pid, grid)
            launch.live += 1
            self.spawn("main", cta, num_warps, fn, (), values)

        launch.start = start
        self._add(launch, rank, stream)

    def fill(self, tensor: torch.Tensor, value: float, *, rank: int = 0, stream: object = 0) -> None:
        """Add a fill of a tensor in stream order, as ``tensor.fill_(value)`` on that stream would be."""
        self.register(f"r{rank}.filled{len(self.launches)}", tensor)
        launch = Launch("fill", rank, self._tail(rank, stream), 0)

        def effect() -> None:
            tensor.fill_(value)
            buffer = self.memory.find(tensor.data_ptr(), 1)
            buffer.shadow.clear()
            buffer.shadow.written = True
            for address in [a for a in self.locations if buffer.start <= a < buffer.end]:
                del self.locations[address]

        launch.effect = effect
        self._add(launch, rank, stream)

    def wait_stream(self, stream: object, other: object, *, rank: int = 0) -> None:
        """Let what is launched on ``stream`` from now on start after what ``other`` holds now."""
        self._streams.setdefault((rank, stream), []).extend(self._tail(rank, other))

    def hold_sms(self, count: int, *, rank: int = 0, until: str = "end") -> None:
        """Let a foreign kernel hold SMs, each of which could hold one CTA of ours.

        Args:
            count: SMs; less than ``resident``, unless it lets go by itself.
            rank: whose GPU.
            until: ``"end"``: until all launches have ended; ``"random"``: until some time.

        Raises:
            ValueError: no ``resident`` limit is set, or nothing is left for ever.
        """
        if until not in ("end", "random"):
            raise ValueError(f"until must be 'end' or 'random', not {until!r}")
        if self.resident is None:
            raise ValueError("hold_sms needs Emulator(resident=...): the number of CTAs that the device can hold")
        if until == "end" and count >= self.resident:
            raise ValueError(f"holding {count} of {self.resident} SMs until the end leaves none for the kernel")
        self._held.setdefault(rank, []).append([count, until])

    def _tail(self, rank: object, stream: object) -> list[Launch]:
        return list(self._streams.get(("virtual" if callable(rank) else rank, stream), []))

    def _add(self, launch: Launch, rank: object, stream: object) -> None:
        self.launches.append(launch)
        self._waiting_launches.append(launch)
        self._streams["virtual" if callable(rank) else rank, stream] = [launch]

    # ------------------------------------------------------------------------------------------------------- run
    def run(self) -> Emulator:
        """Run all launches to their end.

        Returns:
            Itself.

        Raises:
            Fault, Deadlock: at once.
            Race: at the end of the run, with all findings.
            NotEmulated: the kernel uses something the emulator does not have.
        """
        self.hub = getcurrent()
        state.set_machine(self)
        collecting = gc.isenabled()
        gc.disable()  # a run makes very many small objects, hardly any of them garbage
        try:
            with np.errstate(all="ignore"):
                self._loop()
        except (Fault, Deadlock) as alarm:
            alarm.seed = self.seed
            if self.findings:
                raise self._race_of_findings(str(alarm)) from alarm
            raise
        except AssertionError as error:
            raise Fault(f"{self.whose()}: assertion failed: {error}", "assertion", self.seed) from error
        finally:
            state.set_machine(None)
            if collecting:
                gc.enable()
        if self.findings:
            raise self._race_of_findings()
        return self

    def _race_of_findings(self, then: str | None = None) -> Race:
        self.findings = telling_first([reviewed(self, found) for found in self.findings])
        text = "\n".join(map(str, self.findings))
        if then:
            text += f"\nand then: {then}"
        return Race(f"seed {self.seed}: {text}", self.findings[0].kind, self.seed, tuple(self.findings))

    def _loop(self) -> None:
        rng, eager = self.rng, _LAGS[self.lag]
        pct = self.strategy == "pct"
        while True:
            self._start_ctas()
            events = self.events
            ready = self.ready
            if not ready and not events:
                if all(launch.done for launch in self.launches):
                    return
                if self._finish_launches() or self._pass_time():
                    continue
                raise Deadlock(*waiting_report(self))
            self.steps += 1
            self.time += rng.randrange(100)
            if self.steps > self.max_steps:
                text, _ = waiting_report(self)
                raise Deadlock(f"no end after {self.max_steps} steps\n{text}", "livelock")
            if events and (not ready or rng.random() < eager):
                at = rng.randrange(len(events))
                event = events[at]
                events[at] = events[-1]
                events.pop()
                event.fire()
                continue
            if pct:
                agent = max(ready, key=lambda a: a.priority)
                if rng.random() < 0.02:
                    agent.priority = rng.random() - 1
            else:
                agent = ready[rng.randrange(len(ready))]
            self.agent = agent
            agent.let.switch()
            self.agent = None
            if agent.done:
                ready.remove(agent)
                self._finish_launches()

    def _start_ctas(self) -> None:
        if self._waiting_launches:
            self._waiting_launches = [n for n in self.launches if not n.done and (n.start is None or n.unstarted)]
        for launch in self._waiting_launches:
            if not launch.ready:
                continue
            if launch.start is None:
                launch.effect()
                self._end(launch)
                continue
            while launch.unstarted and self._room(launch.device) > 0:
                if self.stagger and self.ready and self.rng.random() < 0.9:
                    break
                launch.start(launch.unstarted.pop(0))

    def _room(self, device: object) -> float:
        if self.resident is None:
            return float("inf")
        held = self._held.get(device, [])
        for hold in held:
            if hold[1] == "random" and (self.rng.random() < 0.001 or not (self.ready or self.events)):
                hold[0] = 0
        live = sum(launch.live for launch in self.launches if launch.device == device)
        return self.resident - live - sum(hold[0] for hold in held)

    def _finish_launches(self) -> bool:
        finished = False
        for launch in self.launches:
            started = launch.start is not None and launch.ready and not launch.unstarted
            if started and not launch.done and launch.live == 0:
                self._end(launch)
                finished = True
        return finished

    def _end(self, launch: Launch) -> None:
        launch.done = True
        clock = launch.clock = self.new_clock()
        for other in launch.after:
            clock.join(other.clock)
        for agent in self.agents:
            if agent.cta.launch is launch:
                clock.join(agent.clock)
        clock.fence(GLOBAL, SHARED)

    def _pass_time(self) -> bool:
        """Everything sleeps: if someone watches the clock, let time pass, more and more of it."""
        sleepers = [a for a in self.agents if a.waiting is not None and a.waiting.timed]
        if not sleepers or self._jump > 10**18:
            return False
        self.time += self._jump
        self._jump *= 4
        for agent in sleepers:
            self.ready.append(agent)
            agent.waiting = None
        return True

    # ------------------------------------------------------------------------------------------------ partitions
    def spawn(
        self,
        part: str,
        cta: CTA,
        num_warps: int,
        fn: Callable,
        args: tuple,
        kwargs: dict | None = None,
        parent: Agent | None = None,
    ) -> Agent:
        """Start a partition of a CTA."""

        def body() -> None:
            with np.errstate(all="ignore"):  # numpy keeps this per coroutine; integers wrap, infinities pass
                fn(*args, **(kwargs or {}))
                self._leave(agent)

        agent = Agent(self, f"{cta.name}.{part}", cta, num_warps, body)
        if parent is not None:
            agent.clock.join(parent.released())
        else:
            for other in cta.launch.after:
                agent.clock.join(other.clock)
        cta.live += 1
        self.agents.append(agent)
        self.ready.append(agent)
        return agent

    def _leave(self, agent: Agent) -> None:
        cta = agent.cta
        unread = [store for store in agent.stores if not store.read_waited]
        if unread:
            where = self.sites[unread[0].reader.site]
            text = f"{agent.name} ends, but nothing waited for the bulk store issued at {where} to finish reading"
            raise Fault(text, "exit")
        if agent.copies or agent.groups:
            raise Fault(f"{agent.name} ends with cp.async copies in flight", "exit")
        for mma in agent.mmas:
            mma.event.fire()
        for store in agent.stores:
            store.write.fire()
            agent.clock.join(completed(store.writer))
        agent.barrier()
        agent.done = True
        cta.live -= 1
        if cta.live == 0:
            known = self.new_clock()
            for each in self.agents:
                if each.cta is cta:
                    known.join(each.clock)
            for load in cta.loads.values():
                # Whether it has come by now is luck; somebody must have waited for it.
                if load.epoch > known.m[0, load.comp]:
                    text = f"{cta.name} ends, but nothing waited for the bulk load issued at {self.sites[load.site]}"
                    raise Fault(text, "exit")
            cta.launch.live -= 1
        self.wake(agent.joiners)

    def point(self, effect: bool = True) -> Agent:
        """A place where the scheduler may switch; returns the running agent."""
        agent = self.agent
        if effect and agent.polls.seen:
            agent.polls.clear()
        if self.rng.random() < self.switch:
            self.hub.switch()
        return agent

    def block(self, text: Callable[[], str], *lists: list, timed: bool = False) -> None:
        """Put the running agent to sleep until one of the lists is woken."""
        agent = self.agent
        agent.waiting = Waiting(text, timed)
        for each in lists:
            each.append(agent)
        self.ready.remove(agent)
        self.hub.switch()
        agent.waiting = None

    def wake(self, waiters: list[Agent]) -> None:
        """Wake all agents of a list."""
        if not waiters:
            return
        for agent in waiters:
            if agent.waiting is not None and agent not in self.ready:
                self.ready.append(agent)
                self._jump = 1000
        waiters.clear()

    # -------------------------------------------------------------------------------------------------- tracking
    def new_component(self, name: str, agent: Agent, *, is_async: bool) -> int:
        """Add a component to the clocks."""
        number = self.num_components
        self.num_components += 1
        if number == len(self.component_is_async):
            self.component_is_async = np.concatenate([self.component_is_async, np.zeros(number, bool)])
        self.component_is_async[number] = is_async
        self.component_names.append(name)
        self.component_agents.append(agent)
        return number

    def new_clock(self) -> Clock:
        """A clock that knows nothing."""
        rows = 3 * (1 + len(SUPPOSE)) if self.diagnose else 3
        return Clock(np.zeros((rows, max(64, self.num_components)), np.int32))

    def site(self) -> int:
        """Number of the kernel's source line that runs."""
        return self.sites.number(sys._getframe(2))

    def whose(self) -> str:
        """Who runs, and where, for a message."""
        if self.agent is None:
            return "a pending operation"
        return f"{self.agent.name} at {self.sites[self.sites.number(sys._getframe(1))]}"

    def race(self, shadow: Shadow, granule: int, earlier: tuple, kind: str, who: Access, fence: bool) -> None:
        """Note a race."""
        if len(self.findings) < _MAX_FINDINGS:
            found = finding(self, shadow, granule, earlier, kind, who, fence)
            if all(found.key != other.key for other in self.findings):
                self.findings.append(found)

    def scope_race(
        self, buffer: Buffer, address: int, earlier: tuple[str, int, str], scope: str, need: str, agent: Agent
    ) -> None:
        """Note two atomics of which one has too narrow a scope."""
        other, site, name = earlier
        found = Finding(
            "scope",
            f"{buffer.name} + {address - buffer.start} B",
            f"atomic of scope {other} by {name} at {self.sites[site]}",
            f"atomic of scope {scope} by {agent.name} at {self.sites[self.site()]}",
            f"only scope {need} contains both sides",
            ("scope", buffer.name, site),
        )
        if len(self.findings) < _MAX_FINDINGS and all(found.key != f.key for f in self.findings):
            self.findings.append(found)

    def unwritten(self, shadow: Shadow, granule: int, who: Access) -> None:
        """A read of memory that nobody wrote."""
        reader = f"{self.component_names[who.comp]} at {self.sites[who.site]}"
        raise Fault(
            f"read of {shadow.name} + {granule * shadow.unit} B, which nobody wrote, by {reader}", "uninitialised"
        )
