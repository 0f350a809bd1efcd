"""The two files of Isaac Lab's asset server that Isaac-Cartpole-Direct needs, made from what is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

GROUND = """#usda 1.0
(
    defaultPrim = "ground"
    metersPerUnit = 1
    upAxis = "Z"
)

def Xform "ground"
{
    def Plane "plane" (
        prepend apiSchemas = ["PhysicsCollisionAPI"]
    )
    {
        uniform token axis = "Z"
    }
}
"""


def main(root: Path) -> None:
    spec = importlib.util.find_spec("newton")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "examples" / "assets" / "cartpole_single_pendulum.usda"
    # Newton's copy of the cart and pole names a root that it does not have.
    cartpole = source.read_text(encoding="utf-8").replace('defaultPrim = "cartPole"', 'defaultPrim = "cartpole"')
    folder = root / "Isaac" / "IsaacLab"
    for path, text in {
        folder / "Robots/Classic/Cartpole/cartpole.usd": cartpole,
        folder / "Environments/Grid/default_ground_plane_checker_v1/default_ground_plane.usda": GROUND,
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
