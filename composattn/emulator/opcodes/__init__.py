"""The instructions that the emulator knows: one row an opcode, in tables by kind."""
