"""What a kernel writes when a wait lasted longer than its deadline, and the error that it becomes.

``trouble`` is int32 [16] on the device: words 0, 1, 2 count the dispatch, load and store roles that gave up, words 8,
9, 10 hold 1 + the row block at which the first of each did, word 15 counts them all. ``alarm`` is one int32 of the
host that the first of them sets, so that the host sees trouble without waiting for the device.
"""

from __future__ import annotations

from moeloom.errors import KernelTimeout
from moeloom.runtime.workspace import Workspace

_WAITS = (
    "dispatch waited for gate/up tiles that read its place in the ring",
    "load waited for the rows of a task",
    "store waited for down tiles that read its place in the ring",
)


def check(workspace: Workspace) -> None:
    """Raise the error of an earlier call, if the device has reported one by now; does not wait otherwise.

    Raises:
        KernelTimeout: a wait inside a kernel lasted longer than its deadline; that call's output is NaN.
    """
    if not workspace.alarm.item():
        return
    found = workspace.trouble.tolist()
    said = [
        f"{text} (row block {block - 1} first, {count} times)"
        for text, count, block in zip(_WAITS, found, found[8:], strict=False)
        if count
    ]
    workspace.trouble.zero_()
    workspace.alarm.zero_()
    raise KernelTimeout("; ".join(said) or "unknown wait")
