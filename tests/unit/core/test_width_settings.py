"""Which widths the settings put on offer."""

import pytest

from dflash_sglang.core.width import WidthSettings
from dflash_sglang.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "block_size", "widths"),
    [
        (WidthSettings(), 16, (1, 4, 8, 16)),
        (WidthSettings(), 10, (1, 4, 8, 10)),  # the block size although it is not in the list
        (WidthSettings(), 1, (1,)),
        (WidthSettings(max_width=6), 16, (1, 4, 6)),
        (WidthSettings(min_width=4), 16, (4, 8, 16)),
        (WidthSettings(min_width=8, max_width=8), 16, (8,)),  # fixed
        (WidthSettings(min_width=5, max_width=5), 16, (5,)),
        (WidthSettings(widths=(16, 4, 4, 1)), 16, (1, 4, 16)),
    ],
)
def test_ladder(settings: WidthSettings, block_size: int, widths: tuple[int, ...]) -> None:
    assert settings.ladder(block_size) == widths


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (WidthSettings(min_width=0), "min_width"),
        (WidthSettings(min_width=9, max_width=8), "min_width"),
        (WidthSettings(max_width=17), "max_width"),
        (WidthSettings(half_life=0), "half_life"),
        (WidthSettings(hysteresis=-0.1), "hysteresis"),
        (WidthSettings(explore_share=0), "explore_share"),
    ],
)
def test_contradictions_are_refused(settings: WidthSettings, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings.ladder(16)
