"""Entry point of the group `sglang.srt.plugins`: runs once in every SGLang process."""

from __future__ import annotations

import logging

from dflash_sglang import cpu
from dflash_sglang.preflight.sglang_names import SGLANG_VERSION, relied_on, verify_contract

logger = logging.getLogger(__name__)


def register() -> None:
    """Check the host and register our hooks, or say why SGLang is left as it is.

    SGLang logs and swallows what a plugin raises, so the reason goes to the log here and is
    repeated by ``python -m dflash_sglang.check``.
    """
    mismatches = verify_contract(relied_on(with_cpu=cpu.activate() is not None))
    if mismatches:
        logger.warning(
            "dflash_sglang is inactive, SGLang's own DFLASH worker serves: %d of the names it "
            "needs differ from sglang %s, first: %s. Run python -m dflash_sglang.check.",
            len(mismatches),
            SGLANG_VERSION,
            mismatches[0],
        )
        return
    from dflash_sglang import hooks
    from dflash_sglang.preflight import server_flags as flags

    cpu.register_choices()
    flags.install()
    hooks.install()
