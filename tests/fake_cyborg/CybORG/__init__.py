"""A stand-in for CybORG in tests: a small game of its own behind the names that freerun uses.

Written for freerun; nothing here is CybORG's. Like the original it draws from the global `random`, parses its scenario
for every simulation, writes down the whole network at every step, and enumerates its actions at every step.
"""

from CybORG.CybORG import CybORG

__all__ = ["CybORG"]
