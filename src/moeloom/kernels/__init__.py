"""Device code, written in Gluon. Only :mod:`moeloom.kernels.sync` touches flags."""
