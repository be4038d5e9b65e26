"""How the tests run: inputs by a seed, cores and tests shared by workers, few garbage collections, GPU tests on a GPU.

The seed is fixed unless `--seed` says otherwise, so that a red run tells of the change and not of the draw.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import traceback
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

try:
    import hypothesis
except ImportError:
    pytest.exit("hypothesis is not installed: pip install -e '.[test]' has what the tests are written with", 4)

from composattn.errors import BackendUnavailable
from composattn.extras import how_to_install
from composattn.graph.dynamo_versions import is_known
from composattn.parallel import context
from tests import durations, reached
from tests.dealing import dealt
from tests.support import has_gpu_backend, has_kernel_toolchain

HERE = Path(__file__).parent

# Folders that need something of the machine: name -> (is it there, what to say when not).
NEEDS = {
    "gpu": (has_gpu_backend, "no Hopper or Blackwell GPU"),
    "compile": (has_kernel_toolchain, "nvidia-cutlass-dsl is not installed (extra: gpu)"),
}

RECORDER = pytest.StashKey[reached.Recorder]()
AT_NIGHT = durations.waits_for_the_night(durations.measured())

for profile in ("fixed", "random"):
    hypothesis.settings.register_profile(
        profile,
        deadline=None,  # the first example of a shape may compile or warm caches
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
        derandomize=profile == "fixed",
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="0", help="a number, the same inputs at each run; or random, others at each run")
    parser.addoption("--record-durations", action="store_true", help="keep what each test took in tests/durations.json")
    parser.addoption("--record-reached", metavar="FILE", help="write what each test uses, see tests/reached.py")


def pytest_configure(config: pytest.Config) -> None:
    # The seed is drawn once and handed to the xdist workers through the environment, which they don't overwrite.
    given = config.getoption("--seed")
    hypothesis.settings.load_profile("random" if given == "random" else "fixed")
    if not hasattr(config, "workerinput"):
        drawn = random.SystemRandom().randrange(2**31)
        os.environ["COMPOSATTN_TEST_SEED"] = str(drawn if given == "random" else int(given))
    if config.getoption("--record-reached"):
        config.stash[RECORDER] = reached.Recorder()
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


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if (HERE / "gpu") in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.nodeid in AT_NIGHT and not config.getoption("--record-durations"):
            item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args):
        there, files = {item.nodeid for item in items}, {item.nodeid.split("::")[0] for item in items}
        gone = sorted(name for name in AT_NIGHT - there if name.split("::")[0] in files)
        if gone:
            raise pytest.UsageError(f"tests/durations.json names tests that are not there: {', '.join(gone)}")
    yield  # what was not asked for is left out
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = dealt(items, workers, lambda item: item.path, lambda item: (HERE / "compile") in item.path.parents)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """What the body of a test's module asks for is used by its tests."""
    recorder = collector.config.stash.get(RECORDER, None)
    recording = recorder.test(collector.path) if recorder and isinstance(collector, pytest.Module) else nullcontext()
    with recording:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    recorder = item.config.stash.get(RECORDER, None)
    with recorder.test(item.path) if recorder else nullcontext():
        return (yield)


TAKEN: dict[str, float] = {}  # seconds of a core that each test took, by node id


def seconds_worked() -> float:
    """Seconds of a core of this process and its ended children: what else a machine does adds little to them."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


worked_before = 0.0  # when the phase of a test began that is reported next


def pytest_runtest_logstart() -> None:
    global worked_before
    worked_before = seconds_worked()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    global worked_before
    report, now = (yield), seconds_worked()
    report.worked, worked_before = now - worked_before, now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    TAKEN[report.nodeid] = TAKEN.get(report.nodeid, 0.0) + report.worked


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--record-durations") and not hasattr(session.config, "workerinput"):
        durations.keep(TAKEN)
    if recorder := session.config.stash.get(RECORDER, None):
        reached.keep(recorder.used, Path(session.config.getoption("--record-reached")))


def pytest_collection_finish() -> None:
    """Garbage is collected seldom, and never looked for among what the modules of all tests hold, a million objects.

    The usual settings take a fifth of the time of a test that emulates a gradient.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def seed_of(item: pytest.Item) -> int:
    """A test's own: the same at each run with one --seed, whichever tests ran before it."""
    return random.Random(f"{os.environ['COMPOSATTN_TEST_SEED']}:{item.nodeid}").randrange(2**31)


# What a test may ask for beside torch and the tools that tests are written with: package -> the extra that brings it.
EXTRAS = {"cutlass": "gpu", "tvm_ffi": "gpu", "matplotlib": "plot", "transformers": "transformers", "attn_gym": "test"}


OF_ANOTHER_DYNAMO = "of which composattn knows torch"  # what `UnsupportedTorch` says


def needed_extra(error: ImportError | BackendUnavailable) -> str | None:
    """The extra that is not installed and that the error tells of, if it tells of one."""
    absent = {package: extra for package, extra in EXTRAS.items() if importlib.util.find_spec(package) is None}
    if isinstance(error, ImportError) and error.name is not None:
        return absent.get(error.name.partition(".")[0])
    return next((extra for extra in absent.values() if how_to_install(extra) in str(error)), None)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    """A test that needs a package which is not installed is left out, and the reason says which extra has it.

    So is one that makes a mod in a region of a torch whose Dynamo nobody tried, where it ends in that refusal.
    """
    try:
        return (yield)
    except (ImportError, BackendUnavailable) as error:
        extra = needed_extra(error)
        if extra is None:
            raise
        pytest.skip(f"extra {extra}: {error}")
    except Exception as error:
        if is_known() or OF_ANOTHER_DYNAMO not in "".join(traceback.format_exception(error)):
            raise
        pytest.xfail(f"UnsupportedTorch: torch {torch.__version__}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(seed_of(item))
    random.seed(seed_of(item))
    context.left.clear()  # rows that ranks of another test have shared are refused in a backward that recomputes


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Random numbers of this test alone."""
    return torch.Generator().manual_seed(seed_of(request.node))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
