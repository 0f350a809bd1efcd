"""How the moments of several sites' normalisers become one: by count, or robustly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from freerun.algorithms.policies.running_moments import RunningMoments


def make_moments(count: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> RunningMoments:
    moments = RunningMoments()
    # Copies: what comes from a message is read-only, and torch takes no such arrays.
    copies = {"mean": np.array(mean, np.float64), "variance": np.array(variance, np.float64)}
    moments.load_state_dict({"count": float(np.asarray(count)), **copies})
    return moments


def merge_by_count(base: RunningMoments, sites: Sequence[RunningMoments]) -> RunningMoments:
    """Return the moments of all rows: those of `base`, which every site began its round with, and all sites' new ones.

    The first site brings the base along; of the others only the new rows are added. So the moments of a single site
    come back bit for bit.
    """
    if not sites:
        return base
    merged = make_moments(sites[0].count, sites[0].mean, sites[0].variance)
    for site in sites[1:]:
        added = new_rows(base, site)
        merged.merge(added.count, added.mean, added.variance)
    return merged


def new_rows(base: RunningMoments, site: RunningMoments) -> RunningMoments:
    """Return the moments b of the rows that a site has added to those of its base a: the inverse of a merge."""
    count = site.count - base.count
    if base.count == 0 or count <= 0:
        return site if base.count == 0 else RunningMoments(site.mean.shape)
    # mean = mean_a + (mean_b - mean_a) * n_b / n, solved for mean_b
    mean = site.mean + (site.mean - base.mean) * base.count / count
    # n * var = n_a * var_a + n_b * var_b + (mean_b - mean_a)^2 * n_a * n_b / n, solved for n_b * var_b
    squares = site.variance * site.count - base.variance * base.count
    squares -= (mean - base.mean) ** 2 * base.count * count / site.count
    # Rounding may leave less than nothing of a variance that is zero.
    return make_moments(count, mean, np.maximum(squares, 0.0) / count)


def merge_by_median(base: RunningMoments, sites: Sequence[RunningMoments]) -> RunningMoments:
    """Return moments that no minority of the sites can move beyond what the others have seen."""
    if not sites:
        return base
    added = len(sites) * float(np.median([site.count - base.count for site in sites]))
    mean, variance = (np.median([getattr(site, name) for site in sites], axis=0) for name in ("mean", "variance"))
    return make_moments(base.count + added, mean, variance)
