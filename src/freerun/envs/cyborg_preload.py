"""Imported by the fork server alone: what a worker would spend its first half second on, done once for all of them."""

from freerun.envs import cyborg

try:
    cyborg.CAGE2("SleepAgent")
except Exception as error:
    # The fork server passes over a module that cannot be imported; a worker that builds the environment says why.
    raise ImportError("CybORG cannot be loaded ahead of time") from error
