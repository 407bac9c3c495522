"""What differs between the embedded pairs: sizes, taps, training schedules, targets."""

from typing import NamedTuple

from bench.train.fit import Recipe
from bench.train.verifier.shape import HYBRID, MOE, VerifierShape


class Targets(NamedTuple):
    """What a pair should reach; its card lists what it does not reach."""

    tau: dict[str, float]  # by block size
    exact: float = 0.9  # share of exact answers in each of `exact_families`
    exact_families: tuple[str, ...] = ()


class PairRecipe(NamedTuple):
    """One embedded pair."""

    title: str  # of its card, after "The embedded"
    shape: VerifierShape
    taps: tuple[int, ...]  # verifier layers the drafter sees; never the last
    verifier: Recipe
    drafter: Recipe
    targets: Targets


RECIPES = {
    "moe": PairRecipe(
        title="pair",
        shape=MOE,
        taps=(1, 3, 4),
        verifier=Recipe(
            2200,
            knots=((0, 0.017), (59, 1.0), (600, 1.0), (800, 0.667), (1500, 0.2553), (2200, 0.02)),
        ),
        drafter=Recipe(1500, knots=((0, 0.025), (39, 1.0), (450, 1.0), (1500, 0.02))),
        targets=Targets(
            tau={"16": 6.0, "8": 4.8},
            exact_families=("add", "json", "code", "sql", "count", "table"),
        ),
    ),
    "hybrid": PairRecipe(
        title="hybrid pair",
        shape=HYBRID,
        taps=(0, 1, 2),
        verifier=Recipe(1600, knots=((0, 0.017), (59, 1.0), (500, 1.0), (1600, 0.02))),
        drafter=Recipe(1000, knots=((0, 0.025), (39, 1.0), (300, 1.0), (1000, 0.02))),
        targets=Targets(tau={"16": 5.0}),
    ),
}
