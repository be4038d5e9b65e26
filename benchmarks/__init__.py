"""The benchmark harness: cases × implementations as data, one run interleaves them, one file keeps the result."""
