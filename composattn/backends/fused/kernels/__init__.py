"""Kernels with no matrix unit, and roles of others: for every architecture."""
