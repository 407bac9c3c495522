"""The ways to serve a pair that are measured, plain decoding first: it is the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dflash_sglang.config import WORKER_VARIABLE

if TYPE_CHECKING:
    from bench.gpu.serve.options import Options
    from bench.gpu.serve.pairs import Pair

PLAIN, ADAPTIVE = "plain", "adaptive"


class Configuration(NamedTuple):
    """One server."""

    name: str
    says: str  # for the report
    speculates: bool = True
    env: Mapping[str, str] = {}
    settings: Mapping[str, object] | None = None  # the settings file; None: not our worker
    args: tuple[str, ...] = ()
    hybrid_only: bool = False  # for verifiers with recurrent layers
    experts_only: bool = False  # for verifiers with a mixture of experts
    restarts: bool = False  # started a second time with the Triton cache of the first

    @property
    def ours(self) -> bool:
        """Whether the worker of this package must serve."""
        return self.settings is not None


BASIC = (
    Configuration(PLAIN, "plain decoding", speculates=False),
    Configuration("builtin", "SGLang's own DFLASH worker", env={WORKER_VARIABLE: "builtin"}),
    Configuration("fixed", "ours, every block verified whole", settings={"width": "fixed"}),
    Configuration(ADAPTIVE, "ours, adaptive width", settings={}, restarts=True),
    Configuration(
        "no-narrowing",
        "ours, adaptive, a single request not narrowed on the device",
        settings={"narrow": False},
        experts_only=True,
    ),
    Configuration(
        "replay",
        "ours, adaptive, recurrent states by replay",
        settings={"rollback": "replay"},
        hybrid_only=True,
    ),
    Configuration(
        "snapshot",
        "ours, adaptive, recurrent states by snapshots",
        settings={"rollback": "snapshot"},
        hybrid_only=True,
    ),
)


def _variant(name: str, *args: str) -> Configuration:
    return Configuration(name, f"ours, adaptive, {' '.join(args)}", settings={}, args=args)


_BACKEND = "--speculative-draft-attention-backend"
VARIANTS = (
    *(_variant(f"draft-{name}", _BACKEND, name) for name in ("fa3", "fa4", "flashinfer", "triton")),
    _variant("attention-triton", "--attention-backend", "triton"),
    *(_variant(f"page-{size}", "--page-size", size) for size in ("16", "64")),
    _variant("fp8-kv", "--kv-cache-dtype", "fp8_e4m3"),
    _variant("no-overlap", "--disable-overlap-schedule"),
)
NAMES = tuple(one.name for one in (*BASIC, *VARIANTS))


def choose_configurations(pair: Pair, options: Options) -> list[Configuration]:
    """Those that are asked for and that the pair has; plain decoding always, as the reference.

    Variants are measured when they are named, or with `--variants`; on a GPU alone.
    """
    named = options.configurations
    chosen = []
    for one in (*BASIC, *VARIANTS):
        if one in VARIANTS:
            wanted = options.variants if named is None else one.name in named
        else:
            wanted = named is None or one.name in named or one.name == PLAIN
        missing = (one.hybrid_only and not pair.hybrid) or (one.experts_only and not pair.experts)
        if wanted and not missing:
            chosen.append(one)
    return chosen
