"""The GPU script where there is no GPU: it runs to the end, and it can fail."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_kernels.case import OPS, Case, Trial, difference
from torch import Tensor

from bench.gpu import __main__ as gpu_check
from bench.gpu import attention as gpu_attention
from bench.gpu import checks
from bench.gpu import speed as gpu_speed
from bench.gpu.results import Result

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "bench/gpu_check.sh", *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_without_a_gpu_it_runs_to_the_end_and_says_what_it_skipped(tmp_path: Path) -> None:
    done = run_script("--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["machine"]["device"] == "no GPU"
    checks = Counter((row["check"], row["passed"]) for row in report["results"])
    skipped = {check for check, passed in checks if passed is None}
    assert skipped == {"ops", "graphs", "speed", "sanitizer", "attention"}
    assert checks["ops", True] > 30
    assert not any(passed is False for _, passed in checks)
    assert all("no GPU" in row["note"] for row in report["results"] if row["passed"] is None)


def test_versions_are_those_of_the_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    # A list by hand stays behind when the pins move.
    assert all(result.passed for result in checks.check_versions())
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    for package in checks.NEEDED:
        assert f"{package}=={checks.pinned(package)}" in pins
    monkeypatch.setattr(checks, "version_of", lambda _: "2.11.0")
    old = {result.case.split()[0]: result for result in checks.check_versions()}
    assert old["torch"].passed is False
    assert f"install torch=={checks.pinned('torch')}" in old["torch"].note


@pytest.mark.parametrize("found", ["absent", "3.6.0"])
def test_an_absent_or_old_triton_fails_by_name(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(checks, "version_of", lambda _: found)
    assert [r.passed for r in checks.check_versions() if r.case == f"triton {found}"] == [False]


def test_every_op_has_cases_and_is_timed() -> None:
    folders = {file.parent.name for file in ROOT.glob("kernels/dflash_kernels/*/kernel.py")}
    assert set(OPS) == folders
    timed = {name.split(",")[0] for name in gpu_speed.smallest(CPU)}
    assert timed == folders | {"token_wise"}


class Cases:
    """A module of cases with these only."""

    def __init__(self, *cases: Case) -> None:
        self.CASES = cases


def with_cases(monkeypatch: pytest.MonkeyPatch, *cases: Case) -> None:
    """In place of all ops there is one, with these cases."""
    monkeypatch.setattr(checks, "OPS", ("draft_tail",))
    monkeypatch.setattr(checks, "part_of", lambda _op, part: Cases(*cases))


def test_a_wrong_result_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = iter([1.0, 1.001])
    trial = Trial(lambda _: [torch.tensor([next(values)])])
    with_cases(monkeypatch, Case("planted", lambda _: trial, 1e-4))
    file = tmp_path / "report.json"
    assert gpu_check.main(["--only", "ops", "--json", str(file)]) == 1
    (row,) = (r for r in json.loads(file.read_text())["results"] if r["case"].endswith("planted"))
    assert row["passed"] is False
    assert row["numbers"]["error"] == pytest.approx(1e-3, rel=0.01)


def test_a_kernel_that_raises_fails_its_case_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> list[Tensor]:
        raise RuntimeError("ptxas failed")

    right = Case("right", lambda _: Trial(lambda _: [torch.zeros(1)]))
    outside = Case("outside", lambda _: Trial(lambda _: [torch.zeros(1)], lambda _: False))
    with_cases(monkeypatch, Case("broken", lambda _: Trial(broken)), right, outside)
    broken_one, right_one, outside_one = list(checks.check_ops(small=True))[-3:]
    assert broken_one.passed is False
    assert "ptxas failed" in broken_one.note
    assert right_one.passed is True
    assert outside_one.passed is False  # of its regime, whatever the reference gives


def test_a_check_that_breaks_fails_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def breaks(_: bool) -> Iterator[Result]:
        yield Result("any", "before", True)
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu_check, "CHECKS", {"graphs": breaks, "speed": breaks})
    file = tmp_path / "report.json"
    assert gpu_check.main(["--json", str(file)]) == 1
    rows = json.loads(file.read_text())["results"]
    assert [(row["check"], row["passed"]) for row in rows] == [
        ("any", True),
        ("graphs", False),
        ("any", True),
        ("speed", False),
    ]
    assert "illegal memory access" in rows[1]["note"]


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), float("inf")),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), float("inf")),
        (torch.zeros(2), torch.zeros(3), float("inf")),
        (torch.tensor([-torch.inf, 100.0]), torch.tensor([-torch.inf, 110.0]), 10 / 110),
        (torch.tensor([torch.nan]), torch.tensor([1.0]), float("inf")),
        (torch.tensor([1.0]), torch.tensor([torch.inf]), float("inf")),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), 0.0),
        (torch.zeros(0), torch.zeros(0), 0.0),
    ],
)
def test_differences(got: Tensor, expected: Tensor, error: float) -> None:
    assert difference(got, expected) == pytest.approx(error)


def test_after_the_time_limit_nothing_is_begun(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert gpu_check.main(["--limit", "0", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["check"] for row in rows] == list(gpu_check.CHECKS)
    assert all(row["passed"] is None and "not begun" in row["note"] for row in rows)


@pytest.mark.parametrize(
    ("code", "passed"),
    [("print('\\nok one')", True), ("raise SystemExit(3)", False), ("input()", None)],
)
def test_a_check_in_a_process_of_its_own(code: str, passed: bool | None) -> None:
    # The last one waits for ever: not a failure, but said.
    code = "import time; time.sleep(99)" if passed is None else code
    command = [sys.executable, "-c", code]
    seconds = 1 if passed is None else 60
    result = checks.in_process("sanitizer", "x", command, seconds, dict(os.environ))
    assert result.passed is passed
    assert passed is not None or "not done in 1 s" in result.note


class TorchWrapper:
    """Plan and run as FlashInfer's wrapper does, by the rule of its kernels, in torch."""

    windows = True  # False: a kernel that was compiled without them

    def __init__(self, *_: Any, paged_kv_indices_buf: Tensor | None = None, **__: Any) -> None:
        self._indices = paged_kv_indices_buf

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page_lens: Tensor,
        *sizes: int,
        causal: bool,
        window_left: int,
        sm_scale: float,
        **_: Any,
    ) -> None:
        self._rows, self._pages, self._ends = qo_indptr, kv_indptr, last_page_lens
        self._given, self._page_size = kv_indices, sizes[3]
        self._causal, self._window_left, self._scale = causal, window_left, sm_scale

    def run(self, q: Tensor, cache: Tensor, out: Tensor) -> Tensor:
        indices = self._given if self._indices is None else self._indices
        for row in range(len(self._ends)):
            begin, end = self._rows[row : row + 2].tolist()
            first, last = self._pages[row : row + 2].tolist()
            kv_len = (last - first - 1) * self._page_size + int(self._ends[row])
            keys, values = cache[indices[first:last].long()].float().unbind(1)
            position, key = torch.arange(end - begin)[:, None], torch.arange(kv_len)
            seen = torch.ones(end - begin, kv_len, dtype=torch.bool)
            if self._causal:
                seen &= ~(key + (end - begin) > kv_len + position)
            if self._window_left >= 0 and self.windows:
                seen &= key + (end - begin) + self._window_left >= kv_len + position
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[begin:end].float().transpose(0, 1),
                keys.flatten(0, 1)[:kv_len].transpose(0, 1),
                values.flatten(0, 1)[:kv_len].transpose(0, 1),
                attn_mask=seen,
                scale=self._scale,
                enable_gqa=True,
            )
            out[begin:end] = attended.transpose(0, 1).to(out.dtype)
        return out


class WithoutWindows(TorchWrapper):
    windows = False


def replayable(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    call()
    return call


def attended(wrapper: type[TorchWrapper], capture: Any = replayable) -> dict[str, bool | None]:
    results: Iterator[Result] = checks.judge_attention(
        gpu_attention.compare_all(CPU, wrapper, capture)
    )
    return {result.case: result.passed for result in results}


@pytest.mark.slow
def test_attention_by_the_kernels_rule_passes() -> None:
    found = attended(TorchWrapper)
    assert len(found) == 2 * 3 * 2  # page sizes, sights, eager and replayed
    assert all(found.values())


@pytest.mark.slow
def test_attention_without_windows_of_its_own_fails() -> None:
    for case, passed in attended(WithoutWindows).items():
        assert passed == ("window_left -1" in case)


@pytest.mark.slow
def test_a_replay_of_the_captured_lengths_fails() -> None:
    def frozen(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        out = call()
        kept = out.clone()
        return lambda: out.copy_(kept)

    for case, passed in attended(TorchWrapper, frozen).items():
        assert passed == case.endswith("eager")
