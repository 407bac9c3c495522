"""The command line of `bench/gpu_serve.sh`."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.gpu.serve.configurations import NAMES
from dflash_sglang import zoo
from dflash_sglang.config import SETTINGS_FLAG
from launch.devices import CPU, GPU, Device

# Requests of a load by concurrency: a few seconds of it, most of them at full load.
REQUESTS = {1: 8, 8: 32, 32: 96}
QUICK_REQUESTS = 3
QUICK_TOKENS = 24
# Each configuration sets it; a server logs prompts with those.
REFUSED = {
    SETTINGS_FLAG: "each configuration brings its own settings",
    "--speculative-algorithm": "each configuration sets it",
    "--speculative-draft-model-path": "give DRAFTER",
    "--model-path": "give MODEL",
    "--port": "a free port is chosen",
    "--host": "servers listen on 127.0.0.1 alone",
    "--log-requests": "it would put prompts into the logs, which are part of the report",
    "--log-requests-level": "it would put prompts into the logs, which are part of the report",
}


class OptionsError(RuntimeError):
    """Options that do not fit together."""


class Options(NamedTuple):
    """What to measure, and where to write it."""

    device: Device  # of the embedded pairs; a model of the user's has the GPU without our limits
    pairs: tuple[str, ...]  # names of embedded pairs
    model: str | None  # the user's verifier: a folder or a hub name
    drafter: str | None
    name: str | None  # of the user's pair in tables; None: from MODEL
    tp: int
    server_flags: tuple[str, ...]  # for every server of the user's pair
    configurations: tuple[str, ...] | None  # None: all
    variants: bool
    requests: Mapping[int, int]  # of a load, by concurrency
    new_tokens: int
    prompts: Path | None  # a line each; for the user's pair
    out: Path
    fresh: bool
    restart: bool  # start once more with a warm Triton cache
    sanitizer: bool
    trace: bool
    gpu_check: Path | None  # what bench/gpu_check.sh wrote, for the archive
    start_timeout: float  # seconds

    @property
    def settles(self) -> dict[str, object]:
        """What a result depends on: another value needs another OUT."""
        return {
            "device": self.device.name,
            "own": self.model is not None,
            "tp": self.tp,
            "server_flags": list(self.server_flags),
            "requests": {str(key): value for key, value in self.requests.items()},
            "new_tokens": self.new_tokens,
            "own_prompts": self.prompts is not None,
        }


def parse(argv: Sequence[str] | None, doc: str | None) -> Options:
    """Reads the command line; exits with a message when the options do not fit together.

    Args:
        argv: the arguments; None for those of this process.
        doc: what `--help` shows above the options.
    """
    parser = new_parser(doc)
    words = sys.argv[1:] if argv is None else list(argv)
    own = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:own])
    concurrency = given.concurrency or ([1] if given.quick else list(REQUESTS))
    options = Options(
        device=CPU if given.cpu else GPU,
        pairs=tuple(() if given.pairs == ["none"] else given.pairs or zoo.names()),
        model=given.model,
        drafter=given.drafter,
        name=given.name,
        tp=given.tp,
        server_flags=tuple(words[own + 1 :]),
        configurations=tuple(given.configurations) if given.configurations else None,
        variants=given.variants,
        requests={n: requests_of(n, given.requests, given.quick) for n in sorted({*concurrency})},
        new_tokens=given.new_tokens or (QUICK_TOKENS if given.quick else 192),
        prompts=given.prompts,
        out=given.out.absolute(),
        fresh=given.fresh,
        restart=given.restart and not (given.quick or given.cpu),
        sanitizer=given.sanitizer,
        trace=given.trace,
        gpu_check=given.gpu_check,
        start_timeout=given.start_timeout,
    )
    if (reason := refusal(options)) is not None:
        parser.error(reason)
    return options


def requests_of(concurrency: int, given: int | None, quick: bool) -> int:
    """Requests of a load: as given, but at least one for each that is in flight."""
    known = QUICK_REQUESTS if quick else REQUESTS.get(concurrency, 3 * concurrency)
    return max(concurrency, known if given is None else given)


def refusal(options: Options) -> str | None:
    """Why the options cannot be run, with what to give instead; None if they can."""
    flags = {flag.partition("=")[0] for flag in options.server_flags}
    if (options.model is None) != (options.drafter is None):
        return "give MODEL and DRAFTER, or neither for the embedded pairs alone"
    if options.model is None and (options.server_flags or options.tp != 1 or options.prompts):
        return "--tp, --prompts and flags after -- are for a model of yours: give MODEL and DRAFTER"
    if options.model is None and not options.pairs:
        return "nothing to measure: give MODEL and DRAFTER, or --pairs"
    if options.model is not None and options.device is CPU:
        return "--cpu is for the embedded pairs: leave MODEL and DRAFTER out"
    if found := sorted(flags & REFUSED.keys()):
        return f"{found[0]} cannot be given after --: {REFUSED[found[0]]}"
    if min(options.requests) < 1 or options.new_tokens < 2 or options.tp < 1:
        return "--concurrency and --tp must be at least 1, --new-tokens at least 2"
    for flag, file in (("--prompts", options.prompts), ("--gpu-check", options.gpu_check)):
        if file is not None and not file.is_file():
            return f"{flag} {file}: there is no such file"
    if options.gpu_check is not None and not is_json(options.gpu_check):
        return f"--gpu-check {options.gpu_check}: no JSON; give the file of gpu_check.sh --json"
    if not options.out.parent.is_dir():
        return f"--out {options.out}: there is no folder {options.out.parent}"
    return None


def is_json(file: Path) -> bool:
    """Whether the file holds a JSON document."""
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu_serve.sh",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [MODEL DRAFTER] [OPTION ...] [-- SGLANG-FLAG-OF-MODEL ...]",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="verifier: a folder or a hub name")
    add("drafter", nargs="?", metavar="DRAFTER", help="its DFlash drafter")
    add("--tp", type=int, default=1, metavar="N", help="tensor parallel size of MODEL")
    add("--name", help="of MODEL in tables (default: its hub name, or its folder's name)")
    add("--pairs", nargs="+", choices=[*zoo.names(), "none"], help="embedded pairs (default: all)")
    add("--configurations", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    add("--variants", action="store_true", help="also draft backends, pages, FP8 KV, no overlap")
    add("--concurrency", nargs="+", type=int, metavar="N", help="default: 1 8 32")
    add("--requests", type=int, metavar="N", help="of a load (default: by concurrency)")
    add("--new-tokens", type=int, metavar="N", help="at most, of an answer (default: 192)")
    add("--prompts", type=Path, metavar="FILE", help="questions for MODEL, one a line")
    add("--out", type=Path, default=Path("gpu-serve"), metavar="DIR", help="default: %(default)s")
    add("--fresh", action="store_true", help="measure again what OUT already holds")
    add("--no-restart", dest="restart", action="store_false", help="no start with a warm cache")
    add("--quick", action="store_true", help="few requests and tokens at concurrency 1")
    add("--cpu", action="store_true", help="embedded pairs on the CPU: tries the flow, not speed")
    add("--sanitizer", action="store_true", help="also two requests under compute-sanitizer")
    add("--trace", action="store_true", help="also 50 steps at concurrency 1 under nsys")
    add("--gpu-check", type=Path, metavar="FILE", help="JSON of bench/gpu_check.sh, to attach")
    add("--start-timeout", type=float, default=1800.0, metavar="S", help="seconds for a start")
    return parser
