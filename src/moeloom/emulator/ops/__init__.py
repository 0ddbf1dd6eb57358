"""The language's functions, one file a family; :mod:`moeloom.emulator.rebuild` says which stands for which."""
