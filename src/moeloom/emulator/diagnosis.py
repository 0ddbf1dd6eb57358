"""From a finding to an explanation: what would have ordered a race, and who waits for what in a deadlock."""

from __future__ import annotations

import dataclasses
import linecache
import re

from moeloom.emulator.alarms import Finding
from moeloom.emulator.clocks import SUPPOSE, Access, Clock, Shadow
from moeloom.emulator.sites import kernel_lines, line_text
from moeloom.emulator.values import Value

_WHY = {
    "barrier": "no partition barrier stands between the other threads' accesses and the release or after the acquire",
    "bulk-wait": "the bulk store is not complete when it is published: wait for it, and not with .read only",
    "scope": "the scope of the release, the acquire or the fence does not contain both sides",
    "release": "the writer's side publishes without release semantics",
    "acquire": "the reader's side looks without acquire semantics",
    "relaxed": "neither side has release or acquire semantics",
    "all": "several parts of publishing are missing",
    "none": "nothing orders them: no flag, barrier or wait leads from one to the other",
}
_KIND = {"relaxed": "release", "all": "unordered"}
#: Which logged operation supplies what a supposition supposes.
_SUPPLY = {"barrier": "barrier", "bulk-wait": "bulk wait", "release": "release fence", "relaxed": "release fence"}


def finding(
    machine: object, shadow: Shadow, granule: int, earlier: tuple, kind: str, who: Access, fence: bool
) -> Finding:
    """Explain one race. ``fence``: it is ordered, only the proxy fence is missing."""
    what, comp, epoch, site = earlier
    sites, names = machine.sites, machine.component_names
    first = f"{what} by {names[comp]} at {sites[site]}"
    second = f"{kind} by {names[who.comp]} at {sites[who.site]}"
    where = f"{shadow.name} + {granule * shadow.unit} B"
    reason, why, review = _reason(machine, shadow, granule, earlier, kind, who, fence)
    key = (reason, shadow.name.split(".", 1)[-1], site, who.site)
    return Finding(reason, where, first, second, why, key, review)


def reviewed(machine: object, found: Finding) -> Finding:
    """Look at a finding again at the end of the run, when the writer has done what it does after the release."""
    late = _later(machine, *found.review) if found.review is not None else None
    if late is None:
        return found
    why = f"{found.review[2]} stands after the release, at {late}"
    return dataclasses.replace(found, kind="publish-order", why=why)


def telling_first(findings: list[Finding]) -> list[Finding]:
    """Put first what tells most.

    Who writes a slot again too early races with its readers and with its earlier writers. Two writers alone say little:
    a finding on the same memory that names a reader goes before them.
    """
    head = findings[0]
    if not (head.first.startswith("write") and head.second.startswith("write")):
        return findings
    memory = head.where.rsplit(" + ", 1)[0]
    for found in findings:
        if found.kind in ("slot-reuse", "bulk-buffer") and found.where.rsplit(" + ", 1)[0] == memory:
            return [found, *(other for other in findings if other is not found)]
    return findings


def _reason(
    machine: object, shadow: Shadow, granule: int, earlier: tuple, kind: str, who: Access, fence: bool
) -> tuple[str, str, tuple | None]:
    what, comp, epoch, _ = earlier
    if fence:
        return (
            "proxy-fence",
            "ordered, but no proxy fence stands between the generic and the asynchronous access",
            (comp, epoch, "proxy fence"),
        )
    if what == "read" and machine.component_names[comp].startswith("bulk store") and shadow.space == "shared":
        return _reuse(machine, shadow, comp)
    if what == "write" and kind == "read" and _began_before(machine, who, comp, epoch):
        return _reuse(machine, shadow, who.comp)
    supposed = _supposed(machine, comp, epoch, who.clock)
    if supposed in (None, "all", "bulk-wait") and what == "read":
        if _is_reuse(machine, shadow, granule, comp, epoch):
            return _reuse(machine, shadow, comp)
        # The schedule made the reader come first, but it was the writer who should have.
        supposed = _supposed(machine, who.comp, who.epoch, machine.read_clocks.get((comp, epoch)))
        comp, epoch = who.comp, who.epoch
    if supposed is None or supposed == "all":
        if what == "write" and kind == "read" and machine.diagnose and shadow.knows_write_before(granule, who.clock):
            return _reuse(machine, shadow, who.comp)
        return "unordered", _WHY["all" if supposed else "none"], None
    early = _early_barrier(machine, comp, epoch) if supposed == "barrier" else None
    if early:
        return "publish-order", f"the bulk wait stands after the barrier, which is at {early}", None
    review = (comp, epoch, _SUPPLY[supposed]) if supposed in _SUPPLY else None
    return _KIND.get(supposed, supposed), _WHY[supposed], review


def _reuse(machine: object, shadow: Shadow, reader: int) -> tuple[str, str, None]:
    """Memory was written again before a reader was done."""
    if shadow.space == "shared" and machine.component_names[reader].startswith("bulk store"):
        return "bulk-buffer", "nothing waited for the bulk store to finish reading its buffer", None
    return "slot-reuse", "written again while an earlier reader may still read it", None


def _began_before(machine: object, reader: Access, writer: int, epoch: int) -> bool:
    """Whether an asynchronous read that took effect after a write had been issued before it, as the writer knew."""
    clock = machine.write_clocks.get((writer, epoch))
    if not reader.is_async or clock is None:
        return False
    agent = machine.component_agents[reader.comp].comp
    clock.fit(agent + 1)
    return bool(clock.m[0, agent] > reader.clock.m[0, agent])


def _supposed(machine: object, comp: int, epoch: int, clock: Clock | None) -> str | None:
    """The first supposition under which a clock knows an access."""
    if not machine.diagnose or clock is None:
        return None
    clock.fit(comp + 1)
    for number, name in enumerate(SUPPOSE, 1):
        if clock.m[3 * number, comp] >= epoch:
            return name
    return None


def _is_reuse(machine: object, shadow: Shadow, granule: int, reader: int, epoch: int) -> bool:
    """Whether the reader had its value from an earlier write that it knew, so that this write is the next one."""
    writer = int(shadow.writer[granule])
    if not machine.diagnose:
        return writer >= 0
    clock = machine.read_clocks.get((reader, epoch))
    if writer < 0 or clock is None:
        return False
    clock.fit(writer + 1)
    return clock.m[0, writer] >= shadow.epoch_of_write(granule)


def _later(machine: object, comp: int, epoch: int, op: str | None) -> str | None:
    """Where the writer did ``op`` only after the release that should have followed it; None if it did not."""
    if op is None or not machine.diagnose:
        return None
    agent = machine.component_agents[comp]
    start = machine.issued.get((comp, epoch)) if machine.component_is_async[comp] else None
    after = agent.log[start:] if start is not None else [n for n in agent.log if n.epoch >= epoch]
    released = False
    for note in after:
        if note.op == "release":
            if released:
                return None
            released = True
        elif note.op in ("store", "look") and released:
            return None
        elif note.op == op and released:
            return machine.sites[note.site]
    return None


def _early_barrier(machine: object, comp: int, epoch: int) -> str | None:
    """Where a partition met between a bulk store and the wait for it, and not again before the release."""
    start = machine.issued.get((comp, epoch))
    if start is None:
        return None
    barrier = None
    for note in machine.component_agents[comp].log[start:]:
        if note.op == "barrier":
            barrier = note.site
        elif note.op == "bulk wait":
            return None if barrier is None else machine.sites[barrier]
        elif note.op == "release":
            return None
    return None


def waiting_report(machine: object) -> tuple[str, str]:
    """Who waits, where and for what; and whether CTAs that did not start are to blame."""
    waiting = [a for a in machine.agents if not a.done]
    unstarted = sum(len(launch.unstarted) for launch in machine.launches if launch.ready)
    lines = [f"seed {machine.seed}: {len(waiting)} partitions wait, {unstarted} CTAs are not started"]
    if unstarted and machine.resident is not None:
        lines[0] += f" (the device holds {machine.resident})"
    for agent in waiting:
        what = agent.waiting.text() if agent.waiting is not None else "its turn"
        lines.append(f"  {agent.name} waits for {what}")
        for file, line, function, frame in kernel_lines(agent.let.gr_frame):
            lines.append(f"      {line_text(file, line, function)}{_locals(file, line, frame)}")
    lines += map(str, machine.findings)
    blocked = unstarted and machine.resident is not None
    return "\n".join(lines), "residency" if blocked else "deadlock"


def _locals(file: str, line: int, frame: object) -> str:
    """Scalars that the line names."""
    names = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", linecache.getline(file, line)))
    shown = []
    for name in names:
        value = frame.f_locals.get(name)
        if isinstance(value, (int, float)) or (isinstance(value, Value) and not value.shape):
            shown.append(f"{name}={value}")
    return "  with " + ", ".join(shown) if shown else ""
