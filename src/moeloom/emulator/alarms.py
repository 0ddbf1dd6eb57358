"""What a run can raise. Every alarm has a kind, so that a test can ask for the right one."""

from __future__ import annotations

from dataclasses import dataclass, field

#: kind -> what it means. Kinds from "release" on are races: two accesses that conflict and that nothing orders.
KINDS = {
    "bounds": "an address outside every registered tensor, or misaligned",
    "uninitialised": "a read of memory that nobody wrote",
    "mbarrier": "an mbarrier used against its rules",
    "before-wait": "the accumulator of an asynchronous wgmma used before the wait that covers it",
    "exit": "a partition or CTA ends while copies it issued are in flight",
    "assertion": "an assertion of the kernel, a division by zero, operands that do not fit",
    "deadlock": "nothing can run and nothing is pending",
    "residency": "a deadlock because CTAs that others wait for cannot become resident",
    "livelock": "no end within the limit of steps",
    "release": "the writer publishes without release semantics",
    "acquire": "the reader looks without acquire semantics",
    "barrier": "no partition barrier between the other threads' accesses and the release, or after the acquire",
    "proxy-fence": "ordered, but no proxy fence between generic and asynchronous accesses",
    "scope": "release, acquire or atomic of a scope that does not contain the other side",
    "bulk-wait": "a bulk store is published before its completion was waited for",
    "publish-order": "all parts of a publish are there, in an order that does not work",
    "slot-reuse": "memory is written again while an earlier reader may still read it",
    "bulk-buffer": "shared memory is written again while a bulk store may still read it",
    "unordered": "nothing orders the two accesses",
}


class Alarm(Exception):
    """A finding of the emulator.

    Attributes:
        kind: a key of :data:`KINDS`.
        seed: seed of the run; the same seed and options give the same run again.
    """

    def __init__(self, text: str, kind: str, seed: int | None = None) -> None:
        super().__init__(text)
        assert kind in KINDS, kind
        self.kind = kind
        self.seed = seed

    def __reduce__(self) -> tuple:
        """Pickle with the kind, so that a worker process can hand it over."""
        return type(self), (self.args[0], self.kind, self.seed)


class Fault(Alarm):
    """An error in any schedule: out of bounds, misuse of a barrier, use before a wait."""


class Deadlock(Alarm):
    """Nothing can run, or nothing ends."""


class Race(Alarm):
    """Accesses that conflict and that nothing orders, whatever the schedule made of them.

    Attributes:
        findings: all different ones of the run; the exception's own kind is the first's.
    """

    def __init__(self, text: str, kind: str, seed: int | None = None, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(text, kind, seed)
        self.findings = findings

    def __reduce__(self) -> tuple:
        """Pickle with the findings."""
        return type(self), (self.args[0], self.kind, self.seed, self.findings)


class NotEmulated(Exception):
    """The kernel uses something that the emulator does not have."""


@dataclass(frozen=True)
class Finding:
    """One race.

    Attributes:
        kind: a key of :data:`KINDS`.
        where: memory and byte offset.
        first, second: "what by whom at which line".
        why: what would have ordered them.
        review: (component, epoch, operation) of a writer who may yet do, too late, what is missing.
    """

    kind: str
    where: str
    first: str
    second: str
    why: str
    key: tuple = field(default=(), compare=False, repr=False)
    review: tuple | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"race ({self.kind}) on {self.where}: {self.why}\n    first  {self.first}\n    second {self.second}"
