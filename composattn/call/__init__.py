"""What one call says: shapes, where sequences lie, blocks, order of the work, and what comes back."""
