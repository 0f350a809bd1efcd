"""Logs each of MuJoCo's warnings once in a run.

MuJoCo prints what it has to say about a model whenever it compiles that model, and adds it to MUJOCO_LOG.TXT in the
current folder. Gymnasium's own HalfCheetah has such a warning with MuJoCo 3.17, so that a run with 64 environments
printed it 64 times. A function that the user has set with `mujoco.set_mju_user_warning` stays.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable

import gymnasium

logger = logging.getLogger("freerun")
LOGGED: set[str] = set()
"""Warnings that this process need not log again: it has, or the process that started it."""


def log_each_once(env: object, already_logged: Iterable[str]) -> None:
    """Call this before an environment is built. `already_logged` are the warnings that another process has logged."""
    # Importing MuJoCo takes a fifth of a second, which environments without it need not wait for. Gymnasium imports it
    # while it builds one of its own; an environment from elsewhere has imported it with its module.
    entry_point = getattr(gymnasium.registry.get(env), "entry_point", "") if isinstance(env, str) else ""
    if "mujoco" not in sys.modules and "mujoco" not in str(entry_point):
        return
    LOGGED.update(already_logged)
    try:
        mujoco = importlib.import_module("mujoco")
    except ImportError:
        return  # Gymnasium says so when it builds the environment
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_log_once)


def _log_once(text: str) -> None:
    if text not in LOGGED:
        LOGGED.add(text)
        logger.warning("MuJoCo: %s", text)
