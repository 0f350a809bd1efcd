"""How processes work together on one machine: shared memory, pipes, signals, and the deaths of processes."""
