"""The fixture ``emulate``."""

from moeloom.emulator.plugin import emulate  # noqa: F401
