"""The host half of every generated kernel: plans, compiled kernels, their arguments and launches."""
