"""The plain DFlash draft head in pure torch: checkpoint format and readable reference."""
