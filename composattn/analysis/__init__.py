"""What given mods leave to compute: tiles to visit and to test, tables of them, gradients of captured tensors."""
