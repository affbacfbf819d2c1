"""``python -m fusedaccum build``: where it builds and for what, beside others, after a crash.

Also what it says when it cannot. A stand-in for setup.py writes an empty file. setup.py itself runs
in test_build_installed.py, with stand-ins for compilers, and compiles in test_build_package.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fusedaccum import __main__, builder, native
from fusedaccum.ops import backends

pytestmark = pytest.mark.long

NOT_YET = "not compiled yet: python -m fusedaccum build"
STAND_IN = """
import os, pathlib, sys, time
import torch

def plan():
    return [], {}, {"torch": torch.__version__, "built": {"_cpu": os.environ.get("FLAGS", "-O3")}, "missing": {}}

if __name__ == "__main__":
    with open(os.environ["COMPILED"], "a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(float(os.environ.get("SECONDS", 0)))
    if "BROKEN" in os.environ:
        print("[1/2] c++ -c x.cpp -Werror\\nIn file included from x.cpp:1:\\nx.h:1:2: error: no such thing\\n  note: this")
        sys.exit(1)
    (library,) = (a.partition("=")[2] for a in sys.argv if a.startswith("--build-lib="))
    pathlib.Path(library, "fusedaccum").mkdir()
    pathlib.Path(library, "fusedaccum/_cpu.so").touch()
""".replace("import torch\n\ndef", "\ndef").replace("    return [], {}", "    import torch\n    return [], {}")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package installed without torch, its sources a stand-in, and a home for its user."""
    folder = tmp_path / "site/fusedaccum"
    source = folder / "_native/source"
    source.mkdir(parents=True)
    (source / "setup.py").write_text(STAND_IN)
    (folder / "_build.json").write_text(
        json.dumps({"torch": None, "missing": {"_cpu": "no torch"}, "sources": "12345"})
    )
    (tmp_path / "compiled").touch()
    for name in ("FUSEDACCUM_CACHE", "CXX", "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COMPILED", str(tmp_path / "compiled"))
    monkeypatch.setenv("PATH", os.environ["PATH"])  # both are changed by a build
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(native, "PACKAGE", folder)
    monkeypatch.setattr(native, "BROUGHT", source)
    monkeypatch.setattr(native, "SOURCE", source)
    anew()
    yield folder
    monkeypatch.undo()
    anew()


def anew():
    """As a process sees it that begins now."""
    native.build.cache_clear()
    native.sources.cache_clear()
    backends.why_missing.cache_clear()


def build():
    try:
        return builder.build(verbose=False)
    finally:
        anew()


def compiled():
    """How often."""
    return len(Path(os.environ["COMPILED"]).read_text().split())


def what_is_in(place):
    return {path.name for path in place.iterdir()} - {".lock", "source"}


# Runs what follows in a process of its own that sees the stand-in.
ELSEWHERE = """
import os, sys, pathlib
from fusedaccum import builder, native
native.PACKAGE = pathlib.Path({folder!r})
native.BROUGHT = native.SOURCE = native.PACKAGE / "_native/source"
native.build.cache_clear(), native.sources.cache_clear()
"""


def elsewhere(package, code, *before, **environment):
    command = [*before, sys.executable, "-c", ELSEWHERE.format(folder=str(package)) + code]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_is_built_lies_in_the_package_and_is_found(package):
    assert native.why_missing("_cpu") == NOT_YET
    target = package / "_native" / native.key()
    assert build() == f"\n_cpu are in {target}"
    assert what_is_in(package / "_native") == {target.name}
    assert what_is_in(target) == {"_cpu.so", "_build.json"}
    assert native.build() == native.read(target) and native.build().torch == torch.__version__
    assert native.why_missing("_cpu") is None
    assert f"\nBuilt: CPU kernels, for torch {torch.__version__}, in {target}.\n" in __main__.summary()
    assert build() == f"Nothing to do: _cpu for torch {torch.__version__} are in {target}"
    assert compiled() == 1


def test_the_key_is_of_torch_python_sources_and_flags(package, monkeypatch, tmp_path):
    keys = [native.key()]
    of_torch = f"torch-{'.'.join(torch.__version__.split('.')[:2])}-cuda-{torch.version.cuda}"
    assert f".cpython-3{sys.version_info.minor}-" in keys[0] and keys[0].endswith(of_torch)
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    keys.append(native.key())
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    keys.append(native.key())
    monkeypatch.setattr(native, "THIS_PYTHON", ".cpython-399-riscv.")
    keys.append(native.key())
    (tmp_path / "csrc").mkdir()  # a checkout
    monkeypatch.setattr(native, "SOURCE", tmp_path)
    for name, text in (("setup.py", ""), ("csrc/x.cpp", ""), ("csrc/x.cpp", " "), ("setup.py", "-O3")):
        (tmp_path / name).write_text(text)
        anew()
        keys.append(native.key())
    assert len(set(keys)) == len(keys)


def test_a_user_without_a_home_has_no_cache(package, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert native.places() == [package / "_native"]
    monkeypatch.setenv("FUSEDACCUM_CACHE", "/shared")
    assert native.places() == [package / "_native", Path("/shared")]


@pytest.mark.parametrize("record", ["[]", "{", '{"of_a_later_version": 1}'])
def test_a_record_that_says_nothing_is_none(package, record):
    (package / "_build.json").write_text(record)
    anew()
    assert native.build() == native.Build()


def test_other_flags_replace_what_was_there(package, monkeypatch):
    build()
    monkeypatch.setenv("FLAGS", "-O0")
    build()
    assert native.build().built == {"_cpu": "-O0"} and what_is_in(package / "_native") == {native.key()}


def test_what_cannot_be_loaded_is_built_again(package, monkeypatch):
    build()
    library = package / "_native" / native.key() / "_cpu.so"
    library.write_text("broken")
    monkeypatch.setattr(native, "why_missing", lambda name: "undefined symbol: x")
    build()
    assert library.read_text() == "" and compiled() == 2


def test_of_builds_that_fit_the_one_with_most_is_used_then_that_of_the_command(package):
    build()
    target = package / "_native" / native.key()
    for built, used in (({"_cpu": "-O3"}, target), ({"_cpu": "-O3", "_cuda": "-O3"}, package)):
        record = {
            "torch": torch.__version__,
            "built": built,
            "sources": "12345",
        }  # of `pip install --no-build-isolation`
        (package / "_build.json").write_text(json.dumps(record))
        anew()
        assert native.build() == native.read(used)
    assert build().startswith("Nothing to do: _cpu and _cuda for torch") and compiled() == 1


def test_after_an_upgrade_of_torch_the_import_says_so_until_it_is_built_again(package, monkeypatch):
    build()
    old = native.key()
    native.warn_of_upgrade()
    with monkeypatch.context() as upgrade:
        upgrade.setattr(torch, "__version__", "2.99.0+cu999")
        anew()
        said = f"built against torch {native.build().torch}, but this is torch 2.99.0+cu999; {native.ADVICE}"
        with pytest.warns(RuntimeWarning) as warned:
            native.warn_of_upgrade()
        assert said in str(warned[0].message)
        assert native.why_missing("_cpu").startswith(f"it was built against torch {native.build().torch}, but this is")
        assert (
            "Missing: CPU kernels, hooks in C++, CUDA kernels. To compile what this machine can: python -m fusedaccum "
            "build\n" in __main__.summary()
        )
        for name in ("LOCAL_RANK", "SLURM_LOCALID"):
            with upgrade.context() as rank:
                rank.setenv(name, "1")
                native.warn_of_upgrade()  # no other rank of the node says it
        with upgrade.context() as worker:  # that multiprocessing spawned
            worker.setattr(native.multiprocessing, "parent_process", object)
            native.warn_of_upgrade()
        upgrade.setenv("LOCAL_RANK", "0")
        with pytest.warns(RuntimeWarning):
            native.warn_of_upgrade()
        build()
        native.warn_of_upgrade()
        assert native.build().torch == "2.99.0+cu999"
        assert what_is_in(package / "_native") == {old, native.key()}
    anew()
    assert native.build().torch == torch.__version__ and native.build().folder.endswith(old)
    native.warn_of_upgrade()


def test_what_is_built_for_another_python_is_none_of_this_ones_business(package):
    build()
    target = package / "_native" / native.key()
    target.rename(target.with_name(target.name.replace(native.THIS_PYTHON, ".cpython-399-riscv.")))
    anew()
    assert native.build().torch is None
    native.warn_of_upgrade()


def test_after_an_upgrade_of_the_package_the_import_says_so_until_it_is_built_again(package):
    build()
    old = native.key()
    (package / "_build.json").write_text(json.dumps({"torch": None, "missing": {}, "sources": "67890"}))
    anew()
    said = f"this package has changed since it was built; {native.ADVICE}"
    with pytest.warns(RuntimeWarning, match=f"^fusedaccum's extension is not used: {said}$"):
        native.warn_of_upgrade()
    assert native.why_missing("_cpu") == said
    build()
    native.warn_of_upgrade()
    assert native.why_missing("_cpu") is None and native.build().sources == "67890"
    assert what_is_in(package / "_native") == {old, native.key()}


@pytest.mark.parametrize(
    "left", ["nothing", "half a record", "a folder for a record", "a file", "a file for all builds"]
)
def test_what_cannot_be_read_is_not_there(package, left):
    """As where a network file system does not show yet what another machine wrote."""
    target = package / "_native" / native.key()
    if left == "a file for all builds":
        os.environ["FUSEDACCUM_CACHE"] = str(package / "_build.json")  # the fixture takes it away again
    elif left == "a file":
        target.touch()
    elif left == "a folder for a record":
        (target / "_build.json").mkdir(parents=True)
    else:
        target.mkdir()
        if left == "half a record":
            (target / "_build.json").write_text('{"torch": "2.')
    anew()
    assert native.read(target) is None and native.why_missing("_cpu") == NOT_YET
    build()
    assert native.why_missing("_cpu") is None and what_is_in(package / "_native") == {target.name}


def test_without_a_compiler_it_says_how_to_get_one(package, monkeypatch, tmp_path):
    for name, value in (("PATH", str(tmp_path)), ("CXX", "ccache-that-is-not-there g++")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(
                SystemExit,
                match=r"^No C\+\+ compiler: .* is not there. Debian, Ubuntu: apt install g\+\+; .*python -m fusedaccum build$",
            ):
                build()
    assert not what_is_in(package / "_native") and not (package / "_native/.lock").exists()


def test_without_setuptools_it_says_how_to_get_them(package, monkeypatch):
    (package / "_native/source/setup.py").write_text("import setuptools")
    monkeypatch.setitem(sys.modules, "setuptools", None)
    with pytest.raises(SystemExit, match=r"pip install setuptools, then python -m fusedaccum build$"):
        build()


def test_of_an_error_it_shows_the_first_lines_and_the_command(package, monkeypatch, capfd):
    monkeypatch.setenv("BROKEN", "")
    with pytest.raises(SystemExit) as error:
        build()
    said = f"It does not compile:\nx.h:1:2: error: no such thing\n  note: this\nAll that was said, and another try: {native.COMMAND} -v"
    assert error.value.code.strip() == said and "[1/2]" not in capfd.readouterr().out
    with pytest.raises(SystemExit):
        builder.build(verbose=True)
    assert "[1/2] c++ -c x.cpp -Werror\n" in capfd.readouterr().out
    assert not what_is_in(package / "_native") and native.why_missing("_cpu") == NOT_YET


def test_the_cache_is_for_a_package_that_is_read_only(package, tmp_path):
    """Root may write everywhere, unless that right is taken away."""
    unprivileged = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    cache = tmp_path / "mine"
    cache.mkdir()
    (package / "_native").chmod(0o555)
    (tmp_path / "cache").mkdir(mode=0o555)
    try:
        code = "print(builder.build(False)); os.environ['FUSEDACCUM_CACHE'] = 'cache/of/mine'; os.chdir({!r})\nbuilder.build(False)"
        done = elsewhere(package, code.format(str(tmp_path)), *unprivileged, FUSEDACCUM_CACHE="mine")
        said = done.communicate()[0]
    finally:
        (package / "_native").chmod(0o755)
    assert f"\n_cpu are in {cache / native.key()}\n" in said
    refused = f"{package / '_native'} (Permission denied), {tmp_path / 'cache/of/mine'} (Permission denied)"
    assert f"No folder to build in: {refused}. Set FUSEDACCUM_CACHE, then python -m fusedaccum build" in said
    os.environ["FUSEDACCUM_CACHE"] = str(cache)  # the fixture takes it away again
    anew()
    assert native.build().folder == str(cache / native.key())


EIGHT = """
native.read(native.PACKAGE), native.build(), builder.runpy.run_path(str(native.PACKAGE / "_native/source/setup.py"))["plan"]()
children = []
for _ in range(8):
    children.append(os.fork())
    if not children[-1]:
        print(builder.build(False), flush=True)
        os._exit(0)
assert not any(os.waitpid(child, 0)[1] for child in children)
"""


@pytest.mark.parametrize("locks", [True, False])
def test_of_eight_at_once_one_compiles_or_one_is_taken(package, locks):
    without = "def flock(*args): raise OSError(95, 'not supported')\nbuilder.fcntl.flock = flock\n"
    done = elsewhere(package, ("" if locks else without) + EIGHT, SECONDS="0.5")
    said = done.communicate()[0]
    assert done.returncode == 0, said
    target = package / "_native" / native.key()
    assert compiled() == 1 if locks else compiled() > 1
    assert said.count(f"are in {target}\n") == 8  # one that begins late has nothing to do
    assert what_is_in(package / "_native") == {target.name}
    assert native.why_missing("_cpu") is None


@pytest.mark.parametrize("killed", ["all", "the builder, not its compiler"])
def test_after_a_kill_nothing_is_found_and_the_next_build_works(package, killed):
    doomed = elsewhere(package, "os.setsid(); builder.build(False)", SECONDS="60" if killed == "all" else "2")
    wait_for(compiled)
    (os.killpg if killed == "all" else os.kill)(doomed.pid, signal.SIGKILL)
    doomed.communicate()
    (left,) = what_is_in(package / "_native")
    anew()
    assert left.startswith(builder.STAGE) and native.why_missing("_cpu") == NOT_YET
    began = time.monotonic()
    build()
    assert native.why_missing("_cpu") is None
    assert what_is_in(package / "_native") == {native.key()}
    if killed != "all":
        assert time.monotonic() - began > 1  # it swept nothing under the compiler
