"""What will be run for a call, decided on the host: which tiling, which kernels, and what these are called with."""
