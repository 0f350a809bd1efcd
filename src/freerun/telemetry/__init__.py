"""What a run reports: the ledger, metrics, displays, the timeline and trackers."""
