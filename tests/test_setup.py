"""The Makefile's set-up, on tiny packages in place of the real ones, and the pins."""

import importlib.metadata
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from readme_runner import ReadmeRunner

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
PYTHONS = re.findall(r"^SUPPORTED = (.*)$", MAKEFILE, re.MULTILINE)[0].split()
THIS_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PIN = re.compile(r"[A-Za-z0-9._-]+==\d[\w.]*( ; python_version (<|>=) \"3\.\d+\")?")

# Runs the interpreter that follows, which then believes that its version is another.
CLAIM_VERSION = """\
    #!/bin/sh
    exec '{python}' -c 'import sys
    sys.version_info = {version}
    exec(sys.argv.pop(1))' "$2"
"""
# An interpreter like Debian's without the package python3-venv.
WITHOUT_VENV = """\
    #!/bin/sh
    exec '{python}' -c 'import sys
    sys.modules["ensurepip"] = None
    exec(sys.argv.pop(1))' "$2"
"""
# Stands in for torchrun and says how it was started.
FAKE_TORCHRUN = """\
    #!/bin/sh
    echo "threads $OMP_NUM_THREADS, arguments" "$@"
"""


class Checkout:
    """A copy of the Makefile with tiny requirements, in a folder with a space."""

    def __init__(self, folder: Path) -> None:
        """Fill `folder`, which has to be empty, and offer pip one package, tiny 1.0."""
        self.folder = folder / "a checkout"
        self.wheels = folder / "wheels"
        self.pip_log = folder / "pip.log"
        self.folder.mkdir()
        self.wheels.mkdir()
        (self.folder / "Makefile").write_text(MAKEFILE)
        (self.folder / "requirements.txt").write_text("tiny==1.0\n")
        (self.folder / "requirements-dev.txt").write_text("-r requirements.txt\n")
        self.offer("tiny", "1.0")

    def offer(self, name: str, version: str) -> None:
        """Put a wheel where pip will find it."""
        info = f"{name}-{version}.dist-info"
        wheel = self.wheels / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}.py", f"VERSION = '{version}'\n")
            archive.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            )
            archive.writestr(
                f"{info}/WHEEL",
                "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            archive.writestr(f"{info}/RECORD", "")
            # A command as DeepSpeed has it: a script, not an entry point.
            script = zipfile.ZipInfo(f"{name}-{version}.data/scripts/{name}")
            script.external_attr = 0o100755 << 16  # a plain file, executable
            code = f"import sys, {name}\nprint({name}.VERSION, sys.argv[1:])\n"
            archive.writestr(script, "#!python\n" + code)

    def environment(self, **extra: str) -> dict[str, str]:
        """Return what make gets: no packages but ours, nothing of an outer make."""
        kept = {"HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}
        # The first python3 on the PATH is the one that runs this test.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        pip = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_LOG": str(self.pip_log),
        }
        return {**kept, "PATH": path, **pip, **extra}

    def make(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run make in the checkout."""
        return subprocess.run(
            ["make", *arguments],
            cwd=self.folder,
            env=environment or self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def set_up(self) -> None:
        """Have a working .venv, and an empty pip log."""
        result = self.make("setup")
        assert result.returncode == 0, result.stderr
        self.pip_log.unlink(missing_ok=True)

    def tiny_version(self) -> str:
        """Return the version of tiny that .venv imports."""
        result = subprocess.run(
            [".venv/bin/python", "-c", "import tiny; print(tiny.VERSION)"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        return result.stdout.strip()

    def files(self) -> set[str]:
        """Return the names of what lies in the checkout."""
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def fresh(tmp_path: Path) -> Checkout:
    """Return a checkout in which nothing was ever run."""
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a checkout that tests share; each begins with `shared.set_up()`."""
    return Checkout(tmp_path_factory.mktemp("shared"))


def write_script(path: Path, template: str, **values: object) -> Path:
    """Write an executable script."""
    path.write_text(textwrap.dedent(template).format(**values))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def requirements(name: str) -> list[str]:
    """Return the lines of a requirements file that are neither comment nor blank."""
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_first_run_installs_and_second_run_does_nothing(fresh: Checkout) -> None:
    first = fresh.make("setup")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines() == [
        "Making .venv.",
        "Installing requirements.txt into .venv; the first time takes minutes.",
    ]
    assert fresh.tiny_version() == "1.0"
    assert fresh.pip_log.exists()

    fresh.pip_log.unlink()
    second = fresh.make("setup")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert not fresh.pip_log.exists(), "pip ran though nothing had changed"


def test_commands_start_though_the_path_holds_a_space(shared: Checkout) -> None:
    shared.set_up()
    command = [shared.folder / ".venv/bin/tiny", "an argument", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.stdout, result.stderr) == ("1.0 ['an argument', '2']\n", "")


def test_changed_requirements_are_installed_into_the_same_venv(
    shared: Checkout,
) -> None:
    shared.set_up()
    kept = shared.folder / ".venv/kept"
    kept.touch()
    shared.offer("tiny", "2.0")
    pins = shared.folder / "requirements.txt"
    try:
        pins.write_text("tiny==2.0\n")
        result = shared.make("setup")
        assert result.returncode == 0, result.stderr
        assert shared.tiny_version() == "2.0"
        assert kept.exists()
    finally:
        pins.write_text("tiny==1.0\n")


def test_development_packages_are_installed_once(shared: Checkout) -> None:
    shared.set_up()
    first = shared.make("setup-dev")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines() == [
        "Installing requirements-dev.txt into .venv; the first time takes minutes."
    ]
    shared.pip_log.unlink()
    second = shared.make("setup-dev")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert not shared.pip_log.exists(), "pip ran though nothing had changed"


@pytest.mark.slow
def test_failed_install_shows_the_error_and_is_tried_again(fresh: Checkout) -> None:
    wheel = next(fresh.wheels.iterdir())
    hidden = wheel.rename(fresh.folder.parent / wheel.name)
    failed = fresh.make("setup")
    assert failed.returncode == 2
    assert "No matching distribution found for tiny==1.0" in failed.stderr
    assert not (fresh.folder / ".venv/requirements.txt.installed").exists()

    hidden.rename(wheel)
    retried = fresh.make("setup")
    assert retried.returncode == 0, retried.stderr
    assert retried.stdout.splitlines()[0] == (
        "The last install did not finish: making .venv again."
    )
    assert fresh.tiny_version() == "1.0"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_install_killed_in_the_middle_is_begun_again(
    shared: Checkout, how: signal.Signals
) -> None:
    shared.set_up()
    (shared.folder / ".venv/requirements.txt.installed").unlink()
    pins = shared.folder / "requirements.txt"
    # An index that takes pip's question and never answers it.
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        environment = shared.environment(
            PIP_INDEX_URL=f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        )
        del environment["PIP_NO_INDEX"]
        pins.write_text("tiny==1.0\nabsent==1.0\n")
        try:
            process = subprocess.Popen(
                ["make", "setup"],
                cwd=shared.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                # A job that a script starts in the background ignores Ctrl-C, and
                # so would all that it starts; a reader's make does not.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            try:
                connection, _ = index.accept()
                connection.recv(1)
                os.killpg(process.pid, how)
                assert process.wait(timeout=300) != 0
                connection.close()
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(timeout=300)
        finally:
            pins.write_text("tiny==1.0\n")
    assert not (shared.folder / ".venv/requirements.txt.installed").exists()

    left_over = shared.folder / ".venv/left_over"
    left_over.touch()
    retried = shared.make("setup")
    assert retried.returncode == 0, retried.stderr
    assert retried.stdout.splitlines()[0] == (
        "The last install did not finish: making .venv again."
    )
    assert not left_over.exists()
    assert shared.tiny_version() == "1.0"


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["no python", "no pip", "half made", "empty"])
def test_broken_venv_is_made_again(shared: Checkout, damage: str) -> None:
    shared.set_up()
    venv = shared.folder / ".venv"
    if damage == "no python":
        (venv / "bin/python").unlink()
    elif damage == "no pip":
        packages = list(venv.glob("lib/python*/site-packages/pip"))
        assert len(packages) == 1
        shutil.rmtree(packages[0])
    elif damage == "half made":
        (venv / "bin/activate").unlink()
    else:
        shutil.rmtree(venv)
        venv.mkdir()

    repaired = shared.make("setup")
    assert repaired.returncode == 0, repaired.stderr
    assert "again." in repaired.stdout.splitlines()[0]
    assert shared.tiny_version() == "1.0"
    assert shared.make("setup").stdout == ""


@pytest.mark.slow
def test_moved_checkout_gets_a_venv_for_its_new_place(shared: Checkout) -> None:
    shared.set_up()
    old_folder = shared.folder
    shared.folder = old_folder.rename(old_folder.with_name("moved checkout"))
    moved = shared.make("setup")
    assert moved.returncode == 0, moved.stderr
    assert moved.stdout.splitlines()[0] == (
        "This .venv was made for another folder or is incomplete: making it again."
    )
    # The first line of a script in bin/ is what a move breaks.
    assert str(shared.folder) in (shared.folder / ".venv/bin/pip").read_text()
    assert shared.tiny_version() == "1.0"


@pytest.mark.slow
def test_another_python_makes_the_venv_again_and_the_same_does_not(
    shared: Checkout,
) -> None:
    shared.set_up()
    chosen = f"PYTHON={sys.executable}"
    same = shared.make("setup", chosen)
    assert (same.returncode, same.stdout) == (0, ""), same.stderr

    # The .venv claims to hold another Python than the one chosen.
    python = shared.folder / ".venv/bin/python"
    real = python.resolve()
    other = next(version for version in PYTHONS if version != THIS_PYTHON)
    python.unlink()
    claimed = tuple(int(part) for part in other.split("."))
    write_script(python, CLAIM_VERSION, python=sys.executable, version=claimed)
    unchosen = shared.make("setup")
    assert (unchosen.returncode, unchosen.stdout) == (0, ""), unchosen.stderr

    changed = shared.make("setup", chosen)
    assert changed.returncode == 0, changed.stderr
    assert changed.stdout.splitlines()[0] == (
        f"This .venv has Python {other}: making it again."
    )
    assert python.resolve() == real
    assert shared.tiny_version() == "1.0"


def test_train_runs_what_it_prints_with_threads_for_two_ranks(
    shared: Checkout,
) -> None:
    shared.set_up()
    write_script(shared.folder / ".venv/bin/torchrun", FAKE_TORCHRUN)
    arguments = "--nproc-per-node=2 03_ddp_torchrun/train.py"
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    threads = max(1, (cores or 1) // 2)
    result = shared.make("train", "ARGS=--text 'my notes.txt'")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"torchrun {arguments} --text 'my notes.txt'",
        f"threads {threads}, arguments {arguments} --text my notes.txt",
    ]

    environment = shared.environment(OMP_NUM_THREADS="7")
    result = shared.make("train", environment=environment)
    assert result.stdout.splitlines()[1] == f"threads 7, arguments {arguments}"


def test_figures_runs_each_script_that_draws_or_says_that_none_does(
    shared: Checkout,
) -> None:
    shared.set_up()
    assert shared.make("figures").stdout == "No script here draws a picture yet.\n"
    chapter = shared.folder / "07_chapter"
    chapter.mkdir()
    for name in ("one", "two"):
        (chapter / f"draw_{name}.py").write_text(f"print('drew {name}')\n")
    drawn = shared.make("figures")
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout.splitlines() == [
        "python 07_chapter/draw_one.py",
        "drew one",
        "python 07_chapter/draw_two.py",
        "drew two",
    ]
    (chapter / "draw_one.py").write_text("raise SystemExit('no ink')\n")
    failed = shared.make("figures")
    assert (failed.returncode, failed.stdout) == (2, "python 07_chapter/draw_one.py\n")
    shutil.rmtree(chapter)


@pytest.mark.parametrize("version", [(2, 7), (3, 8), (3, 9), (3, 15)])
def test_wrong_version_gets_one_line(fresh: Checkout, version: tuple[int, int]) -> None:
    python = write_script(
        fresh.folder.parent / "old python",
        CLAIM_VERSION,
        python=sys.executable,
        version=version,
    )
    before = fresh.files()
    result = fresh.make("train", f"PYTHON={python}")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert (
        f"'{python}' is Python {version[0]}.{version[1]}, "
        "but torch needs 3.10 to 3.14; " in result.stderr
    )
    assert "type: make train PYTHON=python3." in result.stderr
    assert fresh.files() == before


@pytest.mark.parametrize("name", ["python3.99", "/no such/python", "it's", "false"])
def test_python_that_is_none_gets_one_line(fresh: Checkout, name: str) -> None:
    before = fresh.files()
    result = fresh.make("test", f"PYTHON={name}")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert f"There is no working Python called '{name}'; " in result.stderr
    assert "type: make test PYTHON=python3." in result.stderr
    assert fresh.files() == before


def test_python_without_venv_gets_one_line(fresh: Checkout) -> None:
    python = write_script(
        fresh.folder.parent / "bare", WITHOUT_VENV, python=sys.executable
    )
    before = fresh.files()
    result = fresh.make("train", f"PYTHON={python}")
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert f"'{python}' lacks the venv module" in result.stderr
    assert f"type: sudo apt install python{THIS_PYTHON}-venv" in result.stderr
    assert fresh.files() == before


def test_make_alone_lists_every_target(fresh: Checkout) -> None:
    phony = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert len(phony) == 1
    result = fresh.make()
    assert result.returncode == 0, result.stderr
    listed = [line.split()[1] for line in result.stdout.splitlines()]
    assert listed == phony[0].split()
    assert {"train", "test", "lint", "figures", "clean"} < set(listed)


def test_clean_removes_what_make_and_python_left(fresh: Checkout) -> None:
    before = fresh.files()
    for name in (".venv/bin", ".pytest_cache", ".ruff_cache", "__pycache__"):
        (fresh.folder / name).mkdir(parents=True)
    result = fresh.make("clean")
    assert result.returncode == 0, result.stderr
    assert fresh.files() == before


def test_every_requirement_is_one_exact_pin_on_every_python() -> None:
    lines = requirements("requirements.txt")
    development = requirements("requirements-dev.txt")
    assert development.pop(0) == "-r requirements.txt"
    for line in lines + development:
        assert PIN.fullmatch(line), line
    assert len(lines) >= 5
    assert len(development) >= 7

    pins = [Requirement(line) for line in lines + development]
    names = {pin.name for pin in pins}
    assert {"torch", "deepspeed", "transformers", "matplotlib", "pytest"} < names
    assert len(PYTHONS) == 5
    for version in PYTHONS:
        here = [
            pin.name
            for pin in pins
            if pin.marker is None or pin.marker.evaluate({"python_version": version})
        ]
        assert sorted(here) == sorted(names), f"on Python {version}"


def test_what_runs_the_tests_is_what_is_pinned() -> None:
    lines = requirements("requirements.txt") + requirements("requirements-dev.txt")[1:]
    pins = [Requirement(line) for line in lines]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    assert len(pins) >= 12
    for pin in pins:
        # A build for one platform adds to the version: 2.13.0+cpu is a 2.13.0.
        installed = importlib.metadata.version(pin.name).partition("+")[0]
        assert str(pin.specifier) == f"=={installed}", pin.name


def test_every_test_file_and_every_page_is_in_one_of_two_runs() -> None:
    named: list[str] = []
    for target in ("test", "pages"):
        command = ["make", "-n", target]
        apart = {"PATH": os.environ["PATH"]}  # without what a make around us passes on
        said = subprocess.run(
            command, cwd=ROOT, env=apart, capture_output=True, check=True
        )
        last = said.stdout.decode().splitlines()[-1].split()
        assert last[last.index("pytest") + 1] == "-n" and "not slow" in " ".join(last)
        named += [word for word in last if word.endswith((".py", ".md"))]
    files = [str(file.relative_to(ROOT)) for file in ROOT.glob("tests/test_*.py")]
    files += [str(page.relative_to(ROOT)) for page in ReadmeRunner().markdown_files()]
    assert len(files) > 100 and sorted(named) == sorted(files)


def test_workflow_covers_the_oldest_and_newest_python_and_runs_the_same() -> None:
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    matrix = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert matrix == [f'"{PYTHONS[0]}", "3.11", "{PYTHONS[-1]}"']
    ci = ROOT / ".ci/run"
    assert os.access(ci, os.X_OK)
    # The linters run beside the first tests; that they failed is seen at the end.
    ways = r"^(make [\w-]+)(?: PYTHON=\S+| &\nlint=\$!)?$"
    in_ci = re.findall(ways, ci.read_text(), re.MULTILINE)
    assert ci.read_text().count('\nwait "$lint"\n') == 1
    in_workflow = re.findall(r"^ +- run: (make [\w-]+)$", workflow, re.MULTILINE)
    assert in_workflow == ["make lint", "make test", "make pages"]
    assert in_ci == ["make setup-dev", *in_workflow]
