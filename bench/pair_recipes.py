"""What differs between the embedded pairs: sizes, taps and how long to train."""

from typing import NamedTuple

from pair_fit import Recipe
from pair_shape import HYBRID, MOE, VerifierShape


class PairRecipe(NamedTuple):
    """One embedded pair."""

    shape: VerifierShape
    taps: tuple[int, ...]  # verifier layers the drafter sees; never the last
    verifier: Recipe
    drafter: Recipe


RECIPES = {
    "moe": PairRecipe(
        shape=MOE,
        taps=(1, 3, 4),
        verifier=Recipe(
            2200,
            knots=((0, 0.017), (59, 1.0), (600, 1.0), (800, 0.667), (1500, 0.2553), (2200, 0.02)),
        ),
        drafter=Recipe(1500, knots=((0, 0.025), (39, 1.0), (450, 1.0), (1500, 0.02))),
    ),
    "hybrid": PairRecipe(
        shape=HYBRID,
        taps=(0, 1, 2),
        verifier=Recipe(1600, knots=((0, 0.017), (59, 1.0), (500, 1.0), (1600, 0.02))),
        drafter=Recipe(1000, knots=((0, 0.025), (39, 1.0), (300, 1.0), (1000, 0.02))),
    ),
}
