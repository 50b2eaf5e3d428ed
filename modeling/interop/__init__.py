"""Foreign checkpoints in and out: one small file a family."""
