"""What a run leaves on disk: its folder, checkpoints and files that survive a kill, read back without trust."""
