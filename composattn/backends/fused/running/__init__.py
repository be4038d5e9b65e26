"""A call's tensors to launches of its kernels, forward and backward, on a GPU or emulated."""
