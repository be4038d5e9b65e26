"""Where the numbers of a tile lie in a table of tiles that begin with segments; `fused.tiles.segments` makes it."""

WIDE = 6  # sequence, number in the segment, its first row, the one behind its last, its number; one that hosts read
RUN = 4  # first query seen, the one behind the last; first that all keys see, the one behind the last of these


def metadata_numbers(reads: int) -> int:
    """Behind these, of a tile of keys: a run, whether all agree, what each of the `reads` says then."""
    return RUN + 1 + reads
