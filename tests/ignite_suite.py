"""Run the tests of engine and handlers that Ignite ships with its source against the Trainer: ``make ignite``.

The source distribution of the installed version is downloaded; with ``--source`` or ``--master`` a checkout of Ignite
is used instead, its tests and its package. In the tests ``Engine`` is the Trainer, driven with the plain functions that
they bring. A test that fails with Ignite's own engine too (a package is missing, there is no network) does not count.
Which of the others do not hold for a Trainer, and why, is in the table of ``docs/design.md``;
one more is a row there. Any other failure, a test that hangs, and with the installed version a row whose test passes or
does not exist, is an error.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import ignite

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "design.md"
FOLDERS = ("tests/ignite/engine", "tests/ignite/handlers")
TIMEOUT_S = 60
"""For one test: most take milliseconds, so one that hangs is seen at once and named."""
# they need servers, or packages that nothing here needs
SERVICES = ("mlflow", "neptune", "polyaxon", "visdom", "wandb")
FIXTURES = """
import pytest


@pytest.fixture(scope="session")
def worker_id():  # of pytest-xdist, which Ignite's fixtures for one gloo process ask for
    return "master"
"""
AS_TRAINER = """
import ignite.engine
from ignite_engine import Trainer

ignite.engine.Engine = ignite.engine.engine.Engine = Trainer
LISTED = {listed!r}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.partition("[")[0] in LISTED:
            item.add_marker(pytest.mark.xfail(reason="in the table of the page"))
"""


def left_out():
    """Names of the tests in the table of the page, without their parameters."""
    return set(re.findall(r"^\| `(test_\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))


def download(version, folder):
    """The source distribution of pytorch-ignite ``version``, from the package index that pip uses."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, "--dest", folder, f"pytorch-ignite=={version}"], check=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def unpack(archive, folder):
    """The folder of the sources in a source distribution, unpacked into ``folder``."""
    with tarfile.open(archive) as source:
        source.extractall(folder / "source", filter="data")
    (sources,) = (folder / "source").iterdir()
    return sources


def installed_checkout():
    """The checkout that the installed Ignite is imported from (``pip install -e``), if it is one."""
    checkout = Path(ignite.__file__).resolve().parent.parent
    return checkout if is_checkout(checkout) else None


def is_checkout(path):
    """Whether it holds Ignite's package and its tests."""
    return (path / "ignite" / "__init__.py").is_file() and (path / FOLDERS[0]).is_dir()


def version_of(checkout):
    """The version that a checkout's package states."""
    text = (checkout / "ignite" / "__init__.py").read_text(encoding="utf-8")
    return str(dict(re.findall(r'^(__version__) = "(.+)"$', text, flags=re.MULTILINE)).get("__version__", "unknown"))


def outcomes(folder, plugin, paths, package):
    """``passed``, ``failed`` or ``skipped`` for each test, by its module and name.

    Args:
        package: where Ignite is imported from; None: the installed one.
    """
    report = folder / "report.xml"
    search = [str(path) for path in (folder, package, ROOT) if path is not None]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", "-c", os.devnull]
        + [f"--rootdir={folder}", f"--timeout={TIMEOUT_S}", f"--junitxml={report}", "--tb=short", "--disable-warnings"]
        + [f"--ignore=tests/ignite/handlers/test_{service}_logger.py" for service in SERVICES]
        + ["-m", "not tpu and not multinode_distributed", *paths],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"},
    )
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.get("type") if child.tag == "skipped" else child.tag for child in case}
        failed, skipped = kinds & {"failure", "error", "pytest.xfail"}, "pytest.skip" in kinds
        outcome = "failed" if failed else "skipped" if skipped else "passed"
        found[str(case.get("classname")), str(case.get("name"))] = outcome
    return found


def parse():
    """The options; ``checkout`` is the one to test with, or None."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sdist", type=Path, help="a source distribution of the installed version, not downloaded then"
    )
    parser.add_argument(
        "--only", choices=[path.rpartition("/")[2] for path in FOLDERS], help="only the tests of this folder"
    )
    parser.add_argument(
        "--source", type=Path, metavar="PATH", help="a checkout of Ignite, whose package is tested with"
    )
    parser.add_argument(
        "--master",
        action="store_true",
        help="test with --source PATH, or with the checkout that the installed Ignite is imported from; nothing is "
        "cloned: git clone https://github.com/pytorch/ignite first",
    )
    options = parser.parse_args()
    options.checkout = options.source or (installed_checkout() if options.master else None)
    if options.master and options.checkout is None:
        parser.error(
            "--master needs a checkout of Ignite, and the installed one is a release: "
            "git clone https://github.com/pytorch/ignite, then add --source ignite."
        )
    if options.checkout is not None and not is_checkout(options.checkout):
        parser.error(f"--source: {options.checkout} is not a checkout of Ignite: it has no ignite/ or no {FOLDERS[0]}.")
    return options


def main():
    options, listed = parse(), left_out()
    folders = [path for path in FOLDERS if options.only in (None, path.rpartition("/")[2])]
    checkout = options.checkout.resolve() if options.checkout is not None else None
    version = ignite.__version__ if checkout is None else version_of(checkout)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = checkout or unpack(options.sdist or download(version, folder), folder)
        shutil.copytree(sources / "tests", folder / "tests")  # away from its `ignite`: the installed one is tested
        (folder / "as_trainer.py").write_text(FIXTURES + AS_TRAINER.format(listed=listed))
        (folder / "as_engine.py").write_text(FIXTURES)
        found = outcomes(folder, "as_trainer", folders, checkout)
        failed = {test for test, outcome in found.items() if outcome == "failed"}
        functions = sorted(set(map(_node, failed)))
        theirs = outcomes(folder, "as_engine", functions, checkout) if functions else {}
    failed -= {test for test, outcome in theirs.items() if outcome == "failed"}
    passed = [test for test, outcome in found.items() if outcome == "passed"]
    print(f"\npytorch-ignite {version}, tests that pass with its own engine and are not skipped on this machine:")
    for path in folders:
        count = [sum(module.startswith(path.replace("/", ".")) for module, _ in tests) for tests in (passed, failed)]
        print(f"  {path}: {count[0]} of {sum(count)} pass with the Trainer")
    unlisted = sorted(test for test in failed if _function(test) not in listed)
    ran = {_function(test) for test in found}
    passing = sorted(listed & ran - {_function(test) for test in failed})
    gone = sorted(listed - ran) if options.only is None and checkout is None else []
    for module, test in unlisted:
        print(f"FAILED, and not in {PAGE.name}: {module}::{test}")
    for test in passing:
        print(f"In {PAGE.name}, but it does not fail: {test}")
    for test in gone:
        print(f"In {PAGE.name}, but Ignite {version} has no such test: {test}")
    return int(bool(unlisted or gone or (passing and checkout is None) or not passed))


def _node(test):
    """The function as pytest selects it: ``tests/test_engine.py::TestEngine::test_run``."""
    module, _, of_class = test[0].partition(".Test")
    return "::".join([module.replace(".", "/") + ".py", *(["Test" + of_class] if of_class else []), _function(test)])


def _function(test):
    return test[1].partition("[")[0]


if __name__ == "__main__":
    sys.exit(main())
