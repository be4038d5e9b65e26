"""The ground of every plan: GPUs and what their architectures bring, tilings, tiles and the order in which they run."""
