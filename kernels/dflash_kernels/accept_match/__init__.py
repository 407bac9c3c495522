"""Accept the longest prefix of the draft that the verifier would have produced itself."""

from dflash_kernels.accept_match.reference import Acceptance, accept_match

__all__ = ["Acceptance", "accept_match"]
