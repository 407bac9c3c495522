"""Ahead-of-time compile of every launch, for architectures that are not here.

Needs no GPU: Triton and ptxas compile for a named target. A kernel passes when it spills nothing
and, if it streams large tensors, reads them in loads of 16 bytes; controls that must fail show that
the gate can. Nothing here says that a kernel runs, or how fast.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends import nvidia
from triton.compiler import ASTSource

from bench.kernels.launches import (
    BF16,
    VARIANTS,
    VOCABULARY,
    Launch,
    Variant,
    launches_of,
    run_draft_tail,
)
from bench.kernels.specialisations import named_gpu

ARCHITECTURES = (80, 90, 100)  # A100; H100 and H200; B200
BATCH = 8
VECTOR_BYTES = 16
# Ends of the names of kernels that do not stream; choose_row does where a row does not fit.
FEW_BYTES = ("_of_row", "_request", "_drafts", "bound_row", "choose_row")


class Compiled(NamedTuple):
    """What a compiled kernel uses."""

    kernel: str
    arch: str
    registers: int  # a thread
    spill_bytes: int  # stored and loaded, and the stack, which is where spills go
    vector_bytes: int  # width of the loads that bring half of a thread's bytes, or more
    streams: bool

    @property
    def passes(self) -> bool:
        """No spills, and wide loads where it matters."""
        return not self.spill_bytes and (not self.streams or self.vector_bytes >= VECTOR_BYTES)


def compile_all() -> list[Compiled]:
    """Every launch of every variant for every architecture."""
    return [
        compile_launch(launch, arch, is_streaming(variant, launch))
        for variant in VARIANTS
        for launch in launches_of(variant, BATCH)
        for arch in ARCHITECTURES
    ]


def is_streaming(variant: Variant, launch: Launch) -> bool:
    """The kernel reads the op's large tensors; those that gather or merge tiles do not."""
    return variant.streams and not launch.name.endswith(FEW_BYTES)


def compile_controls() -> list[Compiled]:
    """Two launches that must not pass: a tile that cannot fit, and rows that are not aligned."""
    (tile, _) = launches_of(Variant("", lambda bs: run_draft_tail(bs, BF16, 1)), BATCH)
    huge = tile._replace(op="control: huge tile", arguments={**tile.arguments, "TILE": 1 << 16})
    columns = VOCABULARY + 1
    odd = Variant("control: odd stride", lambda bs: run_draft_tail(bs, BF16, 1, columns))
    (unaligned, _) = launches_of(odd, BATCH)
    return [compile_launch(launch, 90, streams=True) for launch in (huge, unaligned)]


def compile_launch(launch: Launch, arch: int, streams: bool) -> Compiled:
    """Compile one launch as Triton would specialise it, and read what it uses."""
    with named_gpu(arch):
        _, _, target, backend, bind = launch.kernel.create_binder()
        bound, specialisation, options = bind(**launch.arguments, **launch.options)
        parsed, signature, constants, attributes = launch.kernel._pack_args(
            backend, options, bound, specialisation, options
        )
        source = ASTSource(launch.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target, parsed.__dict__)
    ptx = compiled.asm["ptx"]
    found = re.search(r"\.target (sm_\w+)", ptx)
    assert found is not None
    registers, spills = read_ptxas(ptx, found[1])
    return Compiled(
        kernel=launch.name,
        arch=found[1],
        registers=registers,
        spill_bytes=spills + stack_bytes(compiled.asm["cubin"]),
        vector_bytes=load_width(ptx),
        streams=streams,
    )


def read_ptxas(ptx: str, target: str) -> tuple[int, int]:
    """Registers a thread, and bytes of spill stores and loads."""
    name = "ptxas-blackwell" if target.startswith("sm_10") else "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [tool(name), "-v", f"--gpu-name={target}", str(file), "-o", f"{file}.o"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, said)
        assert found is not None, said
        return int(found[1])

    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    return number(r"Used (\d+) registers"), spills


def stack_bytes(cubin: bytes) -> int:
    """Stack and local memory of the binary itself, which ptxas above only compiled again."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool("cuobjdump"), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert found is not None, said
    return int(found[1]) + int(found[2])


def load_width(ptx: str) -> int:
    """The largest width such that loads at least as wide bring half of a thread's bytes.

    The rest are single numbers that all threads load, such as a seed or a length.
    """
    widths = [
        int(vector or 1) * int(bits) // 8
        for vector, bits in re.findall(r"ld\.global[.\w:]*?(?:\.v(\d))?\.[bufs](\d+)", ptx)
    ]
    return max(width for width in widths if 2 * sum(w for w in widths if w >= width) >= sum(widths))


def tool(name: str) -> str:
    """A CUDA tool that Triton brings along."""
    return str(Path(nvidia.__file__).parent / "bin" / name)


def as_row(compiled: Compiled) -> Mapping[str, Any]:
    """The row of the JSON file."""
    row = compiled._asdict()
    del row["streams"]
    return row
