"""Blue's actions in `freerun/NetworkDefence-v0`, and which of them can be of use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freerun_envs.network_hosts import DECOYS, HOSTS, RESTORE_LOSS_TENTHS, Ints, can_be_placed

SLEEP, ANALYSE, REMOVE, DECOY, RESTORE = range(5)
"""Kinds of blue's actions."""
ACTIONS = (
    ("Sleep", SLEEP, 0, 0),
    ("Monitor", SLEEP, 0, 0),  # every step ends with a Monitor, as in CybORG, so the action itself adds nothing
    *((f"Analyse {name}", ANALYSE, host, 0) for host, name in enumerate(HOSTS)),
    *((f"Remove {name}", REMOVE, host, 0) for host, name in enumerate(HOSTS)),
    *(
        (f"Decoy{kind} {name}", DECOY, host, decoy)
        for decoy, kind in enumerate(DECOYS)
        for host, name in enumerate(HOSTS)
    ),
    *((f"Restore {name}", RESTORE, host, 0) for host, name in enumerate(HOSTS)),
)
"""Blue's actions in CybORG's order: name, kind, host, and number of the decoy."""
ACTION_NAMES = tuple(name for name, *_ in ACTIONS)
ACTION_KIND, ACTION_HOST, ACTION_DECOY = (np.array(column) for column in list(zip(*ACTIONS, strict=True))[1:])
ACTION_LOSS_TENTHS: Ints = RESTORE_LOSS_TENTHS * (ACTION_KIND == RESTORE)

CLEAN, UNKNOWN, USER, PRIVILEGED = range(4)
"""What blue believes about the compromise of a host."""


def useful_actions(belief: Ints, decoy_services: Ints) -> NDArray[np.bool_]:
    """The mask of the actions: all but decoys that would fail, and Remove and Restore where blue believes in no
    compromise. It tells blue nothing that it does not know: what was not noticed can be found with Analyse.

    Both arrays are [network, host], and the result is [network, action].
    """
    is_mended = (ACTION_KIND == REMOVE) | (ACTION_KIND == RESTORE)
    is_needless = is_mended & (belief[:, ACTION_HOST] == CLEAN)
    fails = (ACTION_KIND == DECOY) & ~can_be_placed(decoy_services[:, ACTION_HOST], ACTION_DECOY, ACTION_HOST)
    useful: NDArray[np.bool_] = ~(is_needless | fails)
    return useful
