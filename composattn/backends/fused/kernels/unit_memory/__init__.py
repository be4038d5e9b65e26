"""Parts of kernels whose products lie in memory of the tensor core: a row a thread."""
