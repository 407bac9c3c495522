"""How does it serve on this GPU? The embedded pairs, then a model and a drafter of your own.

    bench/gpu_serve.sh                                    # the embedded pairs
    bench/gpu_serve.sh MODEL DRAFTER --tp 2               # then your own; folders or hub names
    bench/gpu_serve.sh MODEL DRAFTER -- --mem-fraction-static 0.85
    bench/gpu_serve.sh --cpu --quick                      # the flow, on a machine without a GPU

Run bench/gpu_check.sh first. One server at a time: plain decoding, SGLang's own DFLASH worker, ours
with a fixed width, ours with adaptive width, and what else the verifier has. Everything measured is
written to OUT after each server, so that Ctrl-C keeps it and the same command goes on from there.
OUT/report.zip is the one file to attach to a report: tables, JSON, versions and server logs,
without prompts, answers, paths, host names and keys; look into it before you send it.

Exit status: 0 all servers measured, 1 one of them failed (its row says why), 2 nothing could be
run, 130 interrupted.
"""

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from bench.gpu.serve import archive, tables
from bench.gpu.serve.configurations import choose_configurations
from bench.gpu.serve.measure import FAILED, Measurement
from bench.gpu.serve.options import Options, OptionsError, parse
from bench.gpu.serve.pairs import Pair, PairError, embedded_pair, own_pair
from bench.gpu.serve.results import Results, ResultsError
from bench.gpu.serve.tools import run_tools
from launch import devices
from launch.comparison import say
from launch.devices import DeviceError


def pairs_of(options: Options) -> list[Pair]:
    """The embedded pairs, then the user's own."""
    pairs = [embedded_pair(name, options.device) for name in options.pairs]
    if options.model is not None:
        pairs.append(own_pair(options))
    return pairs


def measure_all(pairs: Sequence[Pair], options: Options, results: Results) -> None:
    """Every configuration of every pair that has not been measured yet."""
    for pair in pairs:
        for configuration in choose_configurations(pair, options):
            if results.has(pair.name, configuration.name):
                say(f"{pair.name}, {configuration.name}: measured before, kept")
                continue
            Measurement(pair, configuration, options, results).run()
        run_tools(pair, options, results)


def run(options: Options) -> int:
    """Measures what is missing, then writes tables and archive, whatever happened."""
    devices.choose(
        gpu=options.device is not devices.CPU, otherwise="try the flow on the CPU: --cpu --quick"
    )
    pairs = pairs_of(options)
    results = Results.open(options, [pair.facts for pair in pairs])
    status = 0
    try:
        measure_all(pairs, options, results)
    except KeyboardInterrupt:
        say("interrupted; what was measured is kept, and the same command goes on from there")
        status = 130
    text = tables.render(results)
    (options.out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    written = archive.write(options, pairs)
    say(f"to attach to a report: {written}")
    return status or int(any(one.status == FAILED for one in results.runs))


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `bench/gpu_serve.sh`."""
    options = parse(argv, __doc__)
    # As Ctrl-C: an exception, so that the server is stopped on the way out.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        return run(options)
    except (DeviceError, OptionsError, PairError, ResultsError) as error:
        say(f"bench/gpu_serve.sh: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
