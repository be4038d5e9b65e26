"""Architecture-neutral building blocks of the kernels, each usable alone and in any combination."""
