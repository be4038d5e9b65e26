"""Context parallel with NCCL, where there are two GPUs: the benchmark's own check, against one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import gpu_backend

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_one_does(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.context_parallel", "--only", "check", "--out", str(rows)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "COMPOSATTN_BACKEND": gpu_backend()}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *found, last = [json.loads(line) for line in rows.read_text().splitlines()]
    assert last == {"done": True}, found
    held = [row for row in found if "check" in row]
    assert len(held) == 7  # six calls, and a rank that fails
    assert [row for row in held if not row["ok_on_all"]] == []
