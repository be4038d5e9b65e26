"""Preprocess, postprocess, and what adds up parts: kernels around the main one, with no tensor core."""
