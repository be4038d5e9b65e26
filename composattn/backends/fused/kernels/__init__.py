"""Kernels with no tensor core, and roles of others: for every architecture."""
