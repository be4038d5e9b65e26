"""What mods leave to do: which tiles a mask visits and tests, what tables say so, what their gradients are."""
