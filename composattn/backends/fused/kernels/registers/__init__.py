"""Parts of kernels whose products lie in registers: groups of threads with rows of their own."""
