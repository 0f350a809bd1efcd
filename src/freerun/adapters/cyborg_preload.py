"""Imported by the fork server only: it does once what every worker would spend its first half second on."""

from freerun.adapters import cyborg

try:
    cyborg.CAGE2("SleepAgent")
except Exception as error:
    # The fork server ignores modules that cannot be imported. A worker that builds the environment reports the reason.
    raise ImportError("CybORG cannot be loaded ahead of time") from error
