"""Serves one pair in several modes and measures each of them with the same prompts."""

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil

from dflash_sglang import zoo
from dflash_sglang.config import READY, SETTINGS_FLAG
from dflash_sglang.cpu.server_args import SPARE_STATES, STATES_PER_REQUEST
from launch import load
from launch.devices import CPU, Device
from launch.progress import Progress
from launch.report import PLAIN, Pass
from launch.serving import Server

# One server: scheduler, launcher and detokenizer import SGLang each.
SERVER_GB = 4.0
MAX_NEW_TOKENS = 192  # the longest held-out answer has fewer
# At most what a prompt, an answer and the reserve of two blocks take.
TOKENS_PER_REQUEST = 512
OURS = "dflash"  # the mode served by the worker of this package
FIXED = "fixed"  # the same with every block verified whole, so that tau is the drafter's alone
FIXED_WIDTH = Path(__file__).parent / "presets" / "fixed-width.json"


class Comparison(NamedTuple):
    """The measured passes, and the server of our worker."""

    passes: list[Pass]  # all rounds; the first one is plain decoding
    server: Server  # ours, still running


class Options(NamedTuple):
    """What to compare."""

    model: str  # name of an embedded pair
    concurrency: tuple[int, ...]
    block_size: int  # counts the anchor
    rounds: int  # measured passes
    with_builtin: bool  # also SGLang's own DFLASH worker
    serve: bool  # let the DFLASH server outlive this process
    device: Device = CPU


class Mode(NamedTuple):
    """One way to serve the verifier."""

    name: str
    drafter: Path | None
    env: Mapping[str, str] = {}
    args: tuple[str, ...] = ()


class ComparisonError(RuntimeError):
    """The comparison could not be made; the message has the reason."""


def choose_prompts(model: str, count: int | None = None) -> list[zoo.Prompt]:
    """The first `count` held-out prompts (None: all), the families in turn."""
    turns = itertools.zip_longest(*zoo.prompts(model).values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


def choose_modes(options: Options) -> list[Mode]:
    """Plain first: its first pass is the reference for all answers; our worker last.

    On a GPU also our worker with a fixed width: answers need not be equal there, so its tau is what
    is compared with what the drafter reaches in float32.
    """
    drafter = zoo.path(options.model).drafter
    modes = [Mode(PLAIN, None)]
    if options.with_builtin:
        modes.append(Mode("builtin", drafter, {"DFLASH_SGLANG_WORKER": "builtin"}))
    if options.device is not CPU:
        modes.append(Mode(FIXED, drafter, args=(SETTINGS_FLAG, str(FIXED_WIDTH))))
    return [*modes, Mode(OURS, drafter)]


def recurrent(verifier: Path) -> bool:
    """Whether an embedded verifier has recurrent layers."""
    config = json.loads((verifier / "config.json").read_text())
    return "linear_attention" in config.get("layer_types", ())


def pair_args(model: str, most: int, device: Device) -> list[str]:
    """Flags that servers of an embedded pair share, so that only the worker differs.

    Args:
        model: name of the pair.
        most: the highest concurrency.
        device: where they run.
    """
    args = ["--max-running-requests", str(most)]
    args += ["--max-total-tokens", str(max(8192, TOKENS_PER_REQUEST * most))]
    # 1: none. Unset, SGLang holds a new prefill back until several slots are free, with DFLASH
    # alone and only near the limit above, which is where this load runs.
    args += ["--min-free-slots-delay", "1"]
    if device is CPU:
        # Nothing runs beside the scheduler on a CPU: overlap would only add a step to every answer.
        args.append("--disable-overlap-schedule")
    elif recurrent(zoo.path(model).verifier):
        # As on the CPU platform; unset, SGLang takes a share of the GPU's memory for the states.
        args += ["--max-mamba-cache-size", str(STATES_PER_REQUEST * most + SPARE_STATES)]
    return args


def make_server(mode: Mode, options: Options) -> Server:
    """The server of one mode."""
    args = pair_args(options.model, max(options.concurrency), options.device)
    if mode.drafter is not None:
        args += ["--speculative-dflash-block-size", str(options.block_size)]
    return Server(
        zoo.path(options.model).verifier,
        mode.drafter,
        args=[*args, *mode.args],
        env=mode.env,
        detached=options.serve and mode.name == OURS,
        device=options.device,
    )


def start(server: Server, name: str) -> None:
    """Starts a server and waits for it, with the seconds it takes."""
    server.start()
    with Progress() as progress:
        server.wait_ready(
            on_wait=lambda seconds: progress.show(f"starting the {name} server: {seconds:.0f} s")
        )
    if name in (OURS, FIXED) and READY not in server.log_path.read_text(errors="replace"):
        raise ComparisonError(
            "SGLang's own worker serves instead of ours; `python -m dflash_sglang.check` says why; "
            f"log: {server.log_path}"
        )


def compare(options: Options, prompts: Sequence[str], stack: ExitStack) -> Comparison:
    """Measures all modes; `stack` stops the servers when it is closed.

    With memory for all of them the servers on a CPU stay up together and take turns, round by
    round, so that a busy minute of the machine hits every mode; waiting servers sleep. Otherwise,
    and on a GPU, of which each takes what it finds free, one server is up at a time.

    Raises:
        ComparisonError: a server runs, but not in its mode.
        ServerError: a server did not start or died.
    """
    modes = choose_modes(options)
    groups, order = group(modes, options.device)
    say(f"{len(modes)} servers ({', '.join(mode.name for mode in modes)}), {order}")
    passes: list[Pass] = []
    for together in groups:
        servers = {mode.name: make_server(mode, options) for mode in together}
        for name, server in servers.items():
            stack.push(server)
            start(server, name)
        passes += measure(servers, prompts, options)
        for name, server in servers.items():
            if name != OURS:
                server.stop()
                server.discard_log()
    # The mode of our worker is the last one of the last group.
    return Comparison(passes, server)


def group(modes: list[Mode], device: Device) -> tuple[list[list[Mode]], str]:
    """Which servers are up together, and that in words."""
    if device is not CPU:
        return [[mode] for mode in modes], "one after another on the GPU"
    if psutil.virtual_memory().available / 1e9 >= SERVER_GB * len(modes):
        return [modes], "all up, taking turns"
    return [[mode] for mode in modes], "one after another, because memory is short"


def measure(
    servers: Mapping[str, Server], prompts: Sequence[str], options: Options
) -> Iterator[Pass]:
    """Warms every server up, then yields the passes of all rounds."""
    warm_up = list(itertools.product(servers, options.concurrency))
    work = list(itertools.product(range(options.rounds), servers, options.concurrency))
    answers = itertools.count(1)
    with Progress() as progress:
        for name, concurrency in warm_up:
            progress.show(f"warming up {name} at concurrency {concurrency}", begins=True)
            load.run(servers[name], prompts[:concurrency], concurrency, MAX_NEW_TOKENS)
        for number, name, concurrency in work:
            doing = f"round {number + 1}: {name} at concurrency {concurrency}"
            progress.show(doing, begins=True)

            def on_answer(doing: str = doing) -> None:
                total = len(work) * len(prompts)
                progress.show(f"{doing}, {next(answers)} of all {total} answers")

            server = servers[name]
            done = load.run(server, prompts, concurrency, MAX_NEW_TOKENS, on_answer)
            if name != PLAIN and not any(answer.verify_count for answer in done.answers):
                raise ComparisonError(
                    f"the {name} server does not speculate; log: {server.log_path}"
                )
            yield Pass(name, concurrency, done)


def say(text: str) -> None:
    """Messages about the run; results go to standard output."""
    print(text, file=sys.stderr, flush=True)
