"""What a server's own log says of its start: memory, widths, compiles while it served."""

import re
from typing import Any

# "Load weight end. ... avail mem=61.20 GB", "... available_gpu_mem=7.12 GB": SGLang's stages.
_FREE = re.compile(r"\] (?P<stage>[^\n]*?)[,.;]? *avail(?:able)?[_ ](?:gpu[_ ])?mem=(?P<gb>[\d.]+)")
# Ours, one for each width that is added.
_WIDTH = re.compile(
    r"DFLASH width (?P<width>\d+): (?P<gb>[\d.]+) GB(?:.*?(?P<free>[\d.]+) GB are free)?"
)
_READY = "The server is fired up"
_COMPILE = re.compile(r"DFLASH[^\n]*\bcompil[^\n]*", re.IGNORECASE)
STAGE = 60  # characters


def memory(log: str) -> dict[str, Any]:
    """Free memory of the GPU in GB: by stage, before and after the widths, and what each took."""
    stages: list[dict[str, Any]] = [
        {"stage": found["stage"][:STAGE], "free_gb": float(found["gb"])}
        for found in _FREE.finditer(log)
    ]
    widths: list[dict[str, Any]] = [
        {
            "width": int(found["width"]),
            "took_gb": float(found["gb"]),
            "free_gb": float(found["free"]) if found["free"] else None,
        }
        for found in _WIDTH.finditer(log)
    ]
    before = after = None
    if widths and widths[0]["free_gb"] is not None:
        before = round(widths[0]["free_gb"] + widths[0]["took_gb"], 2)
        after = widths[-1]["free_gb"]
    elif stages:
        after = stages[-1]["free_gb"]
    return {"stages": stages, "widths": widths, "before_widths_gb": before, "free_gb": after}


def compiles_while_serving(log: str) -> list[str]:
    """Lines of ours that report a compile after the server was ready."""
    _, _, serving = log.partition(_READY)
    return _COMPILE.findall(serving)
