"""Compares plain decoding, SGLang's own DFLASH worker and ours on an embedded pair."""

import argparse
import itertools
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from dflash_sglang import zoo
from launch import devices, load, on_gpu, report
from launch.client import RequestError
from launch.comparison import (
    MAX_NEW_TOKENS,
    OURS,
    ComparisonError,
    Options,
    choose_modes,
    choose_prompts,
    compare,
    say,
)
from launch.devices import CPU, DeviceError
from launch.load import Load
from launch.report import PLAIN, Pass
from launch.serving import Server, ServerError


class Command(NamedTuple):
    """The command line."""

    options: Options
    prompts: int
    json: Path | None


def parse(argv: Sequence[str] | None = None) -> Command:
    """Reads the command line; exits with a message when the options do not fit together."""
    parser = argparse.ArgumentParser(
        prog="launch/demo",
        description="Serve an embedded pair on stock SGLang, plainly and with DFLASH, send "
        "both the same held-out prompts and compare speed and answers. Accelerators are hidden, "
        "unless --gpu is given.",
        epilog="Exit status: 0 all answers identical, 1 an answer differs, 2 it could not be run. "
        "With --gpu answers may differ: 1 says that tau is far below what the drafter reaches.",
    )
    add = parser.add_argument
    add("--model", default="moe", choices=zoo.names(), help="embedded pair (default: moe)")
    add(
        "--concurrency",
        type=numbers,
        nargs="+",
        default=[[1, 8]],
        metavar="N",
        help="requests in flight, one or more numbers (default: 1 8)",
    )
    add("--block-size", type=int, metavar="N", help="default: the drafter's trained block")
    add("--prompts", type=int, default=32, metavar="N", help="how many (default: 32)")
    add("--rounds", type=int, default=3, metavar="N", help="measured passes (default: 3)")
    add("--with-builtin", action="store_true", help="also measure SGLang's own DFLASH worker")
    add(
        "--gpu",
        action="store_true",
        help="serve on this machine's GPU in bfloat16, one server after the other; compares tau "
        "and reports equal answers without requiring them",
    )
    add("--json", type=Path, metavar="FILE", help="write the result there")
    add("--serve", action="store_true", help="leave the DFLASH server running at the end")
    given = parser.parse_args(argv)
    trained = trained_block(zoo.path(given.model).drafter)
    options = Options(
        model=given.model,
        concurrency=tuple(dict.fromkeys(itertools.chain(*given.concurrency))),
        block_size=trained if given.block_size is None else given.block_size,
        rounds=given.rounds,
        with_builtin=given.with_builtin,
        serve=given.serve,
        device=devices.GPU if given.gpu else CPU,
    )
    command = Command(options, given.prompts, given.json)
    if (reason := refusal(command, trained)) is not None:
        parser.error(reason)
    return command


def numbers(text: str) -> list[int]:
    """Reads "8" or "1,8"."""
    return [int(part) for part in text.split(",")]


def refusal(command: Command, trained: int) -> str | None:
    """Returns why the options cannot be run, before any server starts; None if they can."""
    options, prompts, file = command
    most = max(options.concurrency)
    held_out = sum(map(len, zoo.prompts(options.model).values()))
    if not 2 <= options.block_size <= trained:
        return f"--block-size {options.block_size}: the drafter takes 2 to {trained}"
    if min(options.concurrency) < 1 or options.rounds < 1:
        return "--concurrency and --rounds must be at least 1"
    if not most <= prompts <= held_out:
        return (
            f"--prompts {prompts}: at least the highest concurrency ({most}), "
            f"at most the {held_out} held-out prompts"
        )
    if file is not None and not file.absolute().parent.is_dir():
        return f"--json {file}: there is no folder {file.absolute().parent}"
    return None


def trained_block(drafter: Path) -> int:
    """Block size the drafter was trained with."""
    config: dict[str, int] = json.loads((drafter / "config.json").read_text())
    return config["block_size"]


def report_differences(passes: Sequence[Pass], reference: Load, prompts: Sequence[str]) -> None:
    """Prints the first differing answer of every mode and concurrency."""
    seen: set[tuple[str, int]] = set()
    for mode, concurrency, done in passes:
        different = load.first_difference(reference.answers, done.answers)
        if different is not None and (mode, concurrency) not in seen:
            seen.add((mode, concurrency))
            at = different.position
            say(
                f"{mode} at concurrency {concurrency} differs from plain at token {at} of its "
                f"answer to {prompts[different.prompt]!r}\n"
                f"  plain:  ...{different.expected[max(0, at - 4) : at + 5]}\n"
                f"  {mode}: ...{different.got[max(0, at - 4) : at + 5]}"
            )


def print_usage(server: Server, question: str) -> None:
    """Prints a request for the server that is left running, and how to stop it."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": MAX_NEW_TOKENS,
    }
    print(
        f"\nThe DFLASH server keeps running; its log: {server.log_path}\n"
        f"stop it:  kill {server.pid}\n"
        f"request:  curl -s {server.url}/v1/chat/completions "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


def run(command: Command) -> int:
    """The whole comparison; returns the exit status."""
    options = command.options
    chosen = choose_prompts(options.model, command.prompts)
    prompts = [prompt.text for prompt in chosen]
    families = [prompt.family for prompt in chosen]
    with ExitStack() as stack:
        passes, server = compare(options, prompts, stack)
        reference = passes[0].load
        block_sizes = {mode.name: options.block_size for mode in choose_modes(options)}
        rows = report.summarize(passes, reference, {**block_sizes, PLAIN: 1})
        print_result(report.table(rows, passes), passes, families)
        if command.json is not None:
            arguments = {
                **options._asdict(),
                "prompts": command.prompts,
                "device": options.device.name,
            }
            result = report.as_json(rows, passes, families, arguments)
            command.json.write_text(json.dumps(result, indent=1) + "\n")
        good = all(row.identical for row in rows)
        if not good:
            report_differences(passes, reference, prompts)
        if options.device is not CPU:
            good = on_gpu.judge(passes, options, families)
        if not good:
            return 1
        if options.serve:
            stack.pop_all()
            print_usage(server, chosen[0].question)
    return 0


def print_result(table: str, passes: Sequence[Pass], families: Sequence[str]) -> None:
    """Prints the table and what its columns mean."""
    by_family = report.tau_by_family(passes, OURS, families)
    print(
        f"\n{table}\n\n"
        "tokens/s: median of the rounds. tau: mean committed tokens per verify. identical: equal,\n"
        f"token by token, to the first answers of plain decoding ({len(families)} prompts).\n"
        f"tau of {OURS}: {', '.join(f'{name} {value:.1f}' for name, value in by_family.items())}"
    )


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    """Entry point of `launch/demo`."""
    command = parse()
    try:
        devices.choose(gpu=command.options.device is not CPU)
    except DeviceError as error:
        say(f"launch/demo: {error}")
        return 2
    # As Ctrl-C: an exception, so that the servers are stopped on the way out.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    begin = time.monotonic()
    try:
        status = run(command)
    except (ComparisonError, RequestError, ServerError, OSError) as error:
        say(f"launch/demo: {error}")
        return 2
    except KeyboardInterrupt:
        say("launch/demo: interrupted; all servers are stopped")
        return 130
    say(f"took {time.monotonic() - begin:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
