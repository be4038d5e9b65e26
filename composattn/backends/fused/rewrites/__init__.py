"""Calls that are computed as other calls: of residues, of strips, with wider integers."""
