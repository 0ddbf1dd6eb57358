"""Every error that moeloom raises on purpose.

All classes derive from :class:`MoeloomError`, so one ``except`` catches them. Each message names the argument (or
the rank), the rule, what came, and what to do about it; :func:`complain` builds messages of that form.
"""

from __future__ import annotations


class MoeloomError(Exception):
    """Base class of every error that moeloom raises on purpose."""


class ArgumentError(MoeloomError, ValueError):
    """An argument has a value, shape or placement that the layer does not accept. Nothing was started."""


class ArgumentTypeError(MoeloomError, TypeError):
    """An argument has a Python type or dtype that the layer does not accept. Nothing was started."""


class PeerMismatch(MoeloomError, RuntimeError):
    """Ranks of one EP group entered the same call with arguments that do not fit together."""


class PeerLost(MoeloomError, RuntimeError):
    """A rank of the EP group died, or did not come to a call before the deadline.

    Attributes:
        rank: global rank (as in ``torch.distributed.get_rank()``) of the peer that is missing.
        phase: the part of the call that waited for it, for example ``"forward entry"`` or ``"backward push"``.
        seconds: how long this rank waited, in seconds.
        detail: what the transport said.
    """

    def __init__(self, rank: int, phase: str, seconds: float, detail: str = "") -> None:
        self.rank, self.phase, self.seconds, self.detail = rank, phase, seconds, detail
        super().__init__(
            f"rank {rank} was lost in phase '{phase}' after {seconds:.1f} s"
            f"{': ' + detail if detail else ''}. Every rank of the EP group must make the same calls in the same "
            f"order; look at the log of rank {rank} first. The group is not usable any more: restart all of its ranks."
        )

    def __reduce__(self) -> tuple:
        """Pickle by arguments, so that the error crosses process boundaries whole."""
        return type(self), (self.rank, self.phase, self.seconds, self.detail)


class KernelTimeout(MoeloomError, RuntimeError):
    """A wait inside a kernel lasted longer than its deadline. The output of that call is NaN.

    Attributes:
        detail: who waited for what.
    """

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(
            f"a wait inside an earlier kernel lasted longer than its deadline: {detail}. The output of that call is "
            "NaN. Raise timeout_s if the device was stopped on purpose (a debugger, a sleeping laptop)."
        )

    def __reduce__(self) -> tuple:
        """Pickle by arguments, so that the error crosses process boundaries whole."""
        return type(self), (self.detail,)


class ToolchainError(MoeloomError, ImportError):
    """Triton, or a tool that comes with it, is missing or of a version that the kernels do not support."""


class DataError(MoeloomError, ValueError):
    """Training text or a data file that cannot be used."""


class CheckpointError(MoeloomError, RuntimeError):
    """A checkpoint that is missing, damaged, of another model, or refused because it is not safe to read."""


class NonFiniteLoss(MoeloomError, RuntimeError):
    """Training met a loss that is NaN or infinite; the message names the step and the rank."""


def complain(argument: str, rule: str, got: object, fix: str) -> str:
    """Return the text of an argument error: ``argument must rule; got got. fix``."""
    return f"{argument} must {rule}; got {got}. {fix}"
