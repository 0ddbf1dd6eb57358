"""A planted bug: a textual edit of a correct kernel, and the kind of alarm that is right for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.emulator.harness import Case, case

Edit = tuple[str, str]


@dataclass(frozen=True)
class Plant:
    """One bug.

    Attributes:
        name: what is wrong, unique.
        kind: kind of the alarm that is right for it.
        case: ``"file.case"`` of the correct kernel.
        edits: (old, new) texts; each old one is there exactly once.
        options: of the emulator, on top of the case's own.
        also: other kinds that are right, too, because what happens first depends on the schedule.
    """

    name: str
    kind: str
    case: str
    edits: tuple[Edit, ...] = ()
    options: dict = field(default_factory=dict)
    also: tuple[str, ...] = ()

    def load(self) -> tuple[Case, dict]:
        """Return the edited case and the emulator's options."""
        edited = case(self.case, self.edits)
        return edited, edited.options | self.options

    def is_right(self, kind: str) -> bool:
        """Whether an alarm of a kind names this bug."""
        return kind == self.kind or kind in self.also


def bug(
    name: str, kind: str, case: str, *edits: Edit, options: dict | None = None, also: tuple[str, ...] = ()
) -> Plant:
    """A :class:`Plant`, with the edits one after another."""
    return Plant(name, kind, case, edits, options or {}, also)


def without(lines: str) -> Edit:
    """An edit that drops lines, given from the first one's text to the last one's end."""
    return lines + "\n", "pass\n"
