"""From a plan to a compiled kernel, kept in memory and on disk; and to its text, with no GPU."""
