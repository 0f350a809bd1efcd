"""How Isaac Lab is started: version 3 by a context manager, version 2 by a class."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from isaaclab import EVENTS, VERSION


def _note(what: str) -> None:
    EVENTS.append(f"{what}; torch {'torch' in sys.modules}; arguments {sys.argv[1:]}")


if VERSION == 3:

    @contextlib.contextmanager
    def launch_simulation(config: Any, arguments: dict[str, Any]) -> Iterator[None]:
        if getattr(config, "needs_isaac_sim", False):
            raise SystemExit("Isaac Sim is needed for PhysX: pip install isaaclab[isaacsim]")
        _note(f"launched {sorted(arguments.items())}")
        try:
            yield
        except SystemExit as error:
            print(f"closed with {error.code}", flush=True)
            raise

else:

    class AppLauncher:
        def __init__(self, headless: bool, device: str):
            _note(f"launched {[('device', device), ('headless', headless)]}")
            self.app = _App()

    class _App:
        def close(self) -> None:
            print("app closed", flush=True)
