"""The surface of Isaac Lab that the adapter uses, without a simulator. FAKE_ISAAC_VERSION is 2 or 3."""

import os

VERSION = int(os.environ["FAKE_ISAAC_VERSION"])
EVENTS: list[str] = []
"""What was started, in order."""
