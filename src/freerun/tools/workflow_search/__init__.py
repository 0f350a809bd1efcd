"""`freerun search-workflows`: finds the best order of the host groups of cyber defence, in few trainings."""
