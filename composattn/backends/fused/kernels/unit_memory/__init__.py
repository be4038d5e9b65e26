"""Parts of kernels whose products lie in memory of the matrix unit: a row a thread."""
