"""DFlash block-diffusion speculative decoding for stock SGLang."""

__version__ = "0.2.0"
