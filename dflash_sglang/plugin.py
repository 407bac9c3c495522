"""Entry point of the group `sglang.srt.plugins`: runs once in every SGLang process."""

from __future__ import annotations

import logging

from dflash_sglang import cpu
from dflash_sglang.preflight.version import SGLANG_VERSION, installed_version

logger = logging.getLogger(__name__)


def register() -> None:
    """Register our hooks with the SGLang that they were made for, or leave another as it is.

    SGLang logs and swallows what a plugin raises, so the reason goes to the log here and is
    repeated by ``python -m dflash_sglang.check``, which looks every name up that we rely on. Here
    the version answers for them: a wheel's content does not change under one version.
    """
    version = installed_version()
    if version != SGLANG_VERSION:
        logger.warning(
            "dflash_sglang is inactive, SGLang's own DFLASH worker serves: sglang is %s, this "
            "release is made for %s. Run python -m dflash_sglang.check.",
            version or "not installed",
            SGLANG_VERSION,
        )
        return
    from dflash_sglang import hooks
    from dflash_sglang.preflight import server_flags

    cpu.register_choices()
    server_flags.install()
    hooks.install()
