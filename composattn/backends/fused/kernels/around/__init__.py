"""Kernels before and behind the main one, with no matrix unit: statistics, rounding, sums of parts."""
