"""Typed errors. Each message says what is wrong, what was given and what to do instead."""


class DFlashError(Exception):
    """Base of every error this package raises on purpose."""


class ContractError(DFlashError):
    """The installed SGLang does not offer a name or a signature that we rely on."""


class PairError(DFlashError):
    """A draft checkpoint that cannot serve the verifier it was given for."""


class UnsupportedFlagError(DFlashError):
    """A server flag, or a combination of flags, that this worker does not serve."""


class ConfigError(DFlashError):
    """A setting of this package that cannot be read."""


class PlatformError(DFlashError):
    """The CPU platform could not be put in place."""


class OpsError(DFlashError):
    """A device op failed its self-test."""
