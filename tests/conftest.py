"""How the tests run: seeds that can be replayed, a share of the cores a worker, GPU tests only with a GPU."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.support import has_hopper, has_kernel_toolchain

HERE = Path(__file__).parent

# Folders that need something of the machine: name -> (is it there, what to say when not).
NEEDS = {
    "gpu": (has_hopper, "no Hopper GPU"),
    "compile": (has_kernel_toolchain, "nvidia-cutlass-dsl is not installed (extra: gpu)"),
}

hypothesis.settings.register_profile(
    "composattn",
    deadline=None,  # the first example of a shape may compile or warm caches
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    derandomize=False,
)
hypothesis.settings.load_profile("composattn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="replay a run: the seed from its first lines")


def pytest_configure(config: pytest.Config) -> None:
    # The seed is drawn once and handed to the xdist workers through the environment.
    given = config.getoption("--seed")
    if given is not None:
        os.environ["COMPOSATTN_TEST_SEED"] = str(given)
    os.environ.setdefault("COMPOSATTN_TEST_SEED", str(random.SystemRandom().randrange(2**31)))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [f"composattn: torch {torch.__version__}, --seed {os.environ['COMPOSATTN_TEST_SEED']}"]
    for folder, (there, why) in NEEDS.items():
        if not there():
            lines.append(f"composattn: tests/{folder} left out: {why}")
    return lines


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what this machine can't run, importing none of it; the header says what and why."""
    for folder, (there, _) in NEEDS.items():
        if (HERE / folder) in (collection_path, *collection_path.parents) and not there():
            return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (HERE / "gpu") in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Random numbers of this test alone: fresh in every run, the same again under --seed."""
    seed = f"{os.environ['COMPOSATTN_TEST_SEED']}:{request.node.nodeid}"
    return torch.Generator().manual_seed(random.Random(seed).randrange(2**31))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
